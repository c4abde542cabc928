"""Tool calls out of generated text, in the Hermes convention, as the text arrives."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_BLANKS = " \t\r\n"


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of tool call number ``index``: its ``id`` and ``name`` once, at its start, then pieces of arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser:
    """Splits an answer into text and tool calls; how the text is cut into pushes does not matter.

    A call is announced once its name is known and its arguments have begun; its arguments then stream, byte for byte
    as the model wrote them. A block that goes wrong before that is given back as content, whole; one that goes wrong
    later keeps the arguments already streamed and the rest of it is content: nothing is lost. The line break before a
    block, and blanks between blocks and after the last, belong to the convention and are dropped.
    """

    def __init__(self, new_id: Callable[[], str] = _new_id) -> None:
        self._new_id = new_id
        self._deltas: list[ContentDelta | ToolCallDelta] = []
        self._pending = ""
        self._block: _Block | None = None
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        """Take more of the answer and return what has become certain."""
        self._pending += text
        while self._pending and (self._read_block(self._block) if self._block else self._read_text()):
            pass
        return self._take_deltas()

    def finish(self) -> list[ContentDelta | ToolCallDelta]:
        """The answer is over: return what was held back; call once."""
        if self._block is not None:
            self._pending = self._block.unclaimed()
            self._after_call = self._block.announced
            if self._block.phase is _Phase.CLOSE:
                self._pending = ""
        if not self._after_call or self._pending.strip():
            self._emit_text(self._pending)
        return self._take_deltas()

    def _read_text(self) -> bool:
        """Emit text up to a block, or all of it that cannot be the start of one; True if a block begins."""
        at = self._pending.find(_OPEN)
        begins = at >= 0
        text = self._pending[: at if begins else len(self._pending) - _overlap(self._pending)]
        kept = "" if self._after_call and not text.strip() else text.removesuffix("\n")
        self._emit_text(kept)
        if not begins:
            self._pending = self._pending[len(kept) :]
            return False
        self._block = _Block(self._pending[len(kept) : at] + _OPEN)
        self._pending = self._pending[at + len(_OPEN) :]
        return True

    def _read_block(self, block: _Block) -> bool:
        """Read on in a block; True if text after it is left to read."""
        for at, char in enumerate(self._pending):
            try:
                block.take(char)
            except _MalformedBlock:
                self._emit_call(block)
                self._leave_malformed(block, self._pending[at + 1 :])
                return True
            if block.closed:
                self._emit_call(block)
                self._leave(self._pending[at + 1 :])
                return True
        self._emit_call(block)
        self._pending = ""
        return False

    def _leave_malformed(self, block: _Block, rest: str) -> None:
        unclaimed = block.unclaimed()
        if not block.announced:
            self._emit_text(block.opening)
            unclaimed = unclaimed[len(block.opening) :]
        self._leave(unclaimed + rest)
        self._after_call = block.announced

    def _leave(self, rest: str) -> None:
        self._block = None
        self._after_call = True
        self._pending = rest

    def _emit_text(self, text: str) -> None:
        if text:
            self._deltas.append(ContentDelta(text))
            self._after_call = False

    def _emit_call(self, block: _Block) -> None:
        if not block.announced:
            return
        if block.index is None:
            block.index = self._calls
            self._calls += 1
            self._deltas.append(ToolCallDelta(block.index, self._new_id(), block.name, ""))
        if arguments := block.take_arguments():
            self._deltas.append(ToolCallDelta(block.index, None, None, arguments))

    def _take_deltas(self) -> list[ContentDelta | ToolCallDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _overlap(text: str) -> int:
    """Length of the longest proper beginning of the opening tag that ``text`` ends with."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)


class _MalformedBlock(Exception):
    """The block cannot be a tool call, or cannot go on as one."""


class _Phase(Enum):
    OBJECT = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_NAME = auto()
    IN_ARGUMENTS = auto()
    AFTER_VALUE = auto()
    CLOSE = auto()


class _Block:
    """Reads one ``{"name": …, "arguments": {…}}`` and its closing tag, a character at a time."""

    def __init__(self, opening: str) -> None:
        self.opening = opening
        self.phase = _Phase.OBJECT
        self.name: str | None = None
        self.index: int | None = None
        self.announced = False
        self.closed = False
        self._unclaimed = [opening]
        self._arguments: list[str] = []
        self._has_arguments = False
        self._string: list[str] = []
        self._key = ""
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._matched = 0

    def unclaimed(self) -> str:
        """What was read and is part of no announced call."""
        return "".join(self._unclaimed)

    def take_arguments(self) -> str:
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def take(self, char: str) -> None:
        """Read one character; one that does not fit raises, and stays among the unclaimed."""
        self._unclaimed.append(char)
        if self.phase is _Phase.IN_ARGUMENTS:
            self._take_argument(char)
        elif self.phase in (_Phase.IN_KEY, _Phase.IN_NAME):
            self._take_string(char)
        elif self._matched:
            self._take_closing(char)
        elif char not in _BLANKS:
            self._take_punctuation(char)

    def _take_punctuation(self, char: str) -> None:
        match self.phase, char:
            case _Phase.OBJECT, "{":
                self.phase = _Phase.KEY
            case _Phase.KEY, '"':
                self._string, self.phase = [char], _Phase.IN_KEY
            case _Phase.COLON, ":":
                self.phase = _Phase.VALUE
            case _Phase.VALUE, '"' if self._key == "name" and self.name is None:
                self._string, self.phase = [char], _Phase.IN_NAME
            case _Phase.VALUE, "{" if self._key == "arguments" and not self._has_arguments:
                self._has_arguments, self.phase = True, _Phase.IN_ARGUMENTS
                self._announce()
                self._take_argument(char)
            case _Phase.AFTER_VALUE, ",":
                self.phase = _Phase.KEY
            case _Phase.AFTER_VALUE, "}" if self.name is not None:
                self._end_object()
            case _Phase.CLOSE | _Phase.AFTER_VALUE, "<" if self.announced:  # a missing last brace changes nothing
                self.phase = _Phase.CLOSE
                self._take_closing(char)
            case _:
                raise _MalformedBlock

    def _take_string(self, char: str) -> None:
        self._string.append(char)
        if self._escaped or char == "\\":
            self._escaped = not self._escaped
        elif char == '"':
            self._end_string()

    def _end_string(self) -> None:
        try:
            string: str = json.loads("".join(self._string), strict=False)
            string.encode()  # an escape can spell a lone surrogate, which no answer can carry
        except ValueError as error:
            raise _MalformedBlock from error
        if self.phase is _Phase.IN_KEY:
            self._key, self.phase = string, _Phase.COLON
        elif string:
            self.name, self.phase = string, _Phase.AFTER_VALUE
            self._announce()
        else:
            raise _MalformedBlock

    def _take_argument(self, char: str) -> None:
        self._arguments.append(char)
        if self.announced:
            self._unclaimed.clear()
        if self._quoted:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.phase = _Phase.AFTER_VALUE

    def _announce(self) -> None:
        if self.name is not None and self._has_arguments:
            self.announced = True
            self._unclaimed.clear()

    def _end_object(self) -> None:
        if not self._has_arguments:
            self._has_arguments = True
            self._arguments = list("{}")
        self._announce()
        self._unclaimed.clear()
        self.phase = _Phase.CLOSE

    def _take_closing(self, char: str) -> None:
        if char != _CLOSE[self._matched]:
            raise _MalformedBlock
        self._matched += 1
        self.closed = self._matched == len(_CLOSE)

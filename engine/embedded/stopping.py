"""When an answer ends."""

from __future__ import annotations

from redraft.engine.chat.tokenizer import Detokenizer, Tokenizer
from redraft.engine.types import FinishReason, StopConditions


class StopChecker:
    """Takes the tokens of one answer in order and says at which of them it ends.

    After a stop string, ``text_end`` is the length of the answer's text before it, in characters.
    """

    def __init__(self, conditions: StopConditions, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self._conditions = conditions
        self._ends = frozenset(conditions.token_ids) | (frozenset() if conditions.ignore_eos else eos_ids)
        self._detokenizer = Detokenizer(tokenizer) if conditions.strings else None
        self._overlap = max(map(len, conditions.strings), default=1) - 1
        self._text = ""
        self._count = 0
        self.text_end: int | None = None

    @property
    def remaining(self) -> int:
        return self._conditions.max_tokens - self._count

    def push(self, token: int) -> FinishReason | None:
        self._count += 1
        if token in self._ends or self._completes_stop_string(token):
            return "stop"
        return "length" if self.remaining <= 0 else None

    def _completes_stop_string(self, token: int) -> bool:
        if self._detokenizer is None:
            return False
        searched = max(0, len(self._text) - self._overlap)
        self._text += self._detokenizer.push([token])
        found = [at for text in self._conditions.strings if (at := self._text.find(text, searched)) >= 0]
        self.text_end = min(found, default=None)
        return bool(found)

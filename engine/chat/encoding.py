"""Conversations to token ids: the one place where rendering meets tokenizing, for serving and for training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.engine.chat.messages import Message, Tool
from redraft.engine.chat.renderer import ChatContext, Renderer, RenderError
from redraft.engine.chat.tokenizer import Tokenizer

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ChatEncoder:
    """A checkpoint's renderer and tokenizer, joined."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_folder(cls, folder: Path) -> ChatEncoder:
        return cls(Renderer.from_folder(folder), Tokenizer.from_folder(folder))

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of the prompt; only the template writes control tokens, text that spells one stays text."""
        context = self.renderer.context(messages, tools)
        strings = list(_strings([context.messages, context.tools]))
        if not any(map(self._special.search, strings)):
            return tuple(self.tokenizer.encode(self.renderer.render_context(context, add_generation_prompt)))
        mark = next((mark for mark in _NONCHARACTERS if not any(mark in string for string in strings)), None)
        if mark is None:
            raise RenderError("The messages hold control tokens and every Unicode noncharacter; remove either.")
        text = self.renderer.render_context(self._marked(context, mark), add_generation_prompt)
        return tuple(self._encode_marked(text, mark))

    def _marked(self, context: ChatContext, mark: str) -> ChatContext:
        """Break every control token in the conversation with ``mark``, so that the template's own stand out."""

        def broken(value: Any) -> Any:
            if isinstance(value, str):
                while self._special.search(value):
                    value = self._special.sub(lambda match: match[0][0] + mark + match[0][1:], value)
                return value
            if isinstance(value, dict):
                return {broken(key): broken(item) for key, item in value.items()}
            return [broken(item) for item in value] if isinstance(value, list) else value

        return ChatContext(broken(context.messages), broken(context.tools))

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text):
            ids += self.tokenizer.encode_ordinary(text[start : match.start()].replace(mark, ""))
            ids.append(self.tokenizer.special_tokens[match[0]])
            start = match.end()
        return ids + self.tokenizer.encode_ordinary(text[start:].replace(mark, ""))


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [string for item in value for string in _strings(item)] if isinstance(value, list) else []

"""One session of training data, as messages."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from redraft.engine.chat.messages import Message, Tool

Source = Literal["bfcl-single", "bfcl-multi-turn", "airline", "retail", "code", "math", "plain"]

SOURCE_NAMES: tuple[Source, ...] = get_args(Source)


class Conversation(Struct, frozen=True, omit_defaults=True):
    """A session: its tools and messages, forced assistant turns and simulated tool results included.

    ``family`` is the scenario family, the unit of splits. Assistant messages before index ``start`` are history
    alone: nobody is asked for them. ``truth`` says that those from ``start`` on are worth imitating. The last message
    is a user's or a tool's where the source knows no answer.
    """

    id: str
    source: Source
    family: str
    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    start: int = 0
    truth: bool = False

    @property
    def user_texts(self) -> tuple[str, ...]:
        return tuple(message.content for message in self.messages if message.role == "user" and message.content)

    @property
    def asked_turns(self) -> tuple[int, ...]:
        """Indices of the messages the target is asked for; one past the end where the last message awaits an answer."""
        turns = [i for i, message in enumerate(self.messages) if message.role == "assistant" and i >= self.start]
        if self.messages[-1].role != "assistant":
            turns.append(len(self.messages))
        return tuple(turns)

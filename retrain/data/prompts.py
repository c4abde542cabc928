"""Prompts: what the target is asked, in token ids, exactly as serving would render it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.splits import Split, split_of

if TYPE_CHECKING:  # who only reads prompts needs neither tokenizer nor template
    from redraft.engine.chat.encoding import ChatEncoder

MAX_PROMPT_TOKENS = 6000


class Prompt(Struct, frozen=True):
    """A session up to one of its turns; ``turn`` is the index of the assistant message it asks for."""

    id: str
    source: Source
    family: str
    split: Split
    session: str
    turn: int
    ids: tuple[int, ...]


@dataclass
class Prompts:
    """The prompts of some conversations, once each; iterating counts what was left out.

    ``cut`` counts sessions that end early because a prompt would have more than ``MAX_PROMPT_TOKENS`` tokens,
    ``repeated`` prompts that equal an earlier one of the same family.
    """

    encoder: ChatEncoder
    conversations: Iterable[Conversation]
    cut: int = 0
    repeated: int = 0
    _seen: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def __iter__(self) -> Iterator[Prompt]:
        for conversation in self.conversations:
            split = split_of(conversation.source, conversation.family)
            for turn in conversation.asked_turns:
                ids = self.encoder.encode_chat(conversation.messages[:turn], conversation.tools)
                if len(ids) > MAX_PROMPT_TOKENS:
                    self.cut += 1
                    break
                if (conversation.family, ids) in self._seen:
                    self.repeated += 1
                    continue
                self._seen.add((conversation.family, ids))
                yield Prompt(
                    id=f"{conversation.id}:{turn}",
                    source=conversation.source,
                    family=conversation.family,
                    split=split,
                    session=conversation.id,
                    turn=turn,
                    ids=ids,
                )

"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from redraft.engine.types import DrafterVersion


class Proposal(Struct, frozen=True):
    """Drafted tokens in order, with draft_prob beside them or the length of the match they continue."""

    tokens: tuple[int, ...] = ()
    draft_prob: tuple[float, ...] | None = None
    match_length: int | None = None


class DraftState(Protocol):
    """A drafter's view of one sequence; it sees committed tokens only and never those of another tenant."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that became part of the sequence."""
        ...

    def propose(self, length: int) -> Proposal:
        """At most ``length`` tokens that may follow."""
        ...


class Drafter(Protocol):
    version: DrafterVersion

    def start(self, tokens: Sequence[int]) -> DraftState:
        """A state for a sequence that begins with these tokens."""
        ...

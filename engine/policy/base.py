"""Who decides how many drafted tokens are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from redraft.engine.drafters.base import Proposal


class BlockLength(NamedTuple):
    """Drafted tokens to verify; ``explored`` says that the length was fixed, not chosen by what was drafted."""

    length: int
    explored: bool


class BlockLengthPolicy(Protocol):
    def block_lengths(self, proposals: Sequence[Proposal]) -> list[BlockLength]:
        """One for each sequence of the coming pass, at most as long as what it proposes."""
        ...

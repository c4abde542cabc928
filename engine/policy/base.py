"""Who decides how many drafted tokens are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from redraft.engine.drafters.base import Proposal


class BlockLengthPolicy(Protocol):
    def block_lengths(self, proposals: Sequence[Proposal]) -> list[int]:
        """Drafted tokens to verify for each sequence of the coming pass, at most as many as each proposes."""
        ...

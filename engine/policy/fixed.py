"""A fixed block length: every drafted token is verified, up to the block size."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.engine.drafters.base import Proposal
from redraft.engine.policy.base import BlockLength


class FixedLength:
    def __init__(self, block_size: int) -> None:
        self._length = block_size - 1

    def block_lengths(self, proposals: Sequence[Proposal]) -> list[BlockLength]:
        return [BlockLength(min(self._length, len(proposal.tokens)), explored=True) for proposal in proposals]

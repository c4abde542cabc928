"""Prompt lookup: propose what followed the longest earlier match of the text's end.

Source: Saxena, "Prompt Lookup Decoding" (2023). Agents copy identifiers, tool results and code, so the session's own
text predicts itself. It needs no training, and it only ever reads the sequence that it drafts for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from redraft.engine.drafters.base import DraftSequence, Proposal, TargetRows
from redraft.engine.types import FLOOR


class NgramDrafter:
    """The floor: always loaded, and what serves when no trained drafter may.

    >>> NgramDrafter().propose([DraftSequence([1, 2, 3, 4, 5, 9, 1, 2, 3], length=2)])
    [Proposal(tokens=(4, 5), draft_prob=None, match_length=3)]
    """

    version = FLOOR
    feature_layers: tuple[int, ...] = ()
    kv: Tensor | None = None

    def new_kv(self, slots: int) -> Tensor | None:
        return None

    def materialise(self, rows: TargetRows) -> None:
        """It reads tokens only."""

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        return [_continue(sequence) for sequence in sequences]


def _continue(sequence: DraftSequence) -> Proposal:
    found = sequence.index.find(sequence.tokens) if sequence.length > 0 else None
    if found is None:
        return Proposal()
    end, matched = found
    return Proposal(tuple(sequence.tokens[end : end + sequence.length]), match_length=matched)

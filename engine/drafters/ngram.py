"""Prompt lookup: propose what followed the longest earlier match of the text's end.

Source: Saxena, "Prompt Lookup Decoding" (2023). Agents copy identifiers, tool results and code, so the session's own
text predicts itself. It needs no training, and it only ever reads the sequence that it drafts for.
"""

from __future__ import annotations

from collections.abc import Sequence

from redraft.engine.drafters.base import Proposal
from redraft.engine.types import DrafterVersion

MIN_MATCH = 3
"""Shortest suffix worth continuing, in tokens."""

MAX_MATCH = 32
CANDIDATES = 16
"""Latest places compared for the longest match."""


class NgramState:
    """Positions after every run of MIN_MATCH tokens in one sequence.

    >>> state = NgramState([1, 2, 3, 4, 5, 9, 1, 2, 3])
    >>> state.propose(2)
    Proposal(tokens=(4, 5), draft_prob=None, match_length=3)
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        first = max(MIN_MATCH, len(self._tokens) + 1)
        self._tokens.extend(tokens)
        for end in range(first, len(self._tokens) + 1):
            self._ends.setdefault(tuple(self._tokens[end - MIN_MATCH : end]), []).append(end)

    def propose(self, length: int) -> Proposal:
        earlier = self._ends.get(tuple(self._tokens[-MIN_MATCH:]), [])[-CANDIDATES - 1 : -1]
        if length < 1 or not earlier:
            return Proposal()
        matched, end = max((self._match_length(end), end) for end in earlier)
        return Proposal(tuple(self._tokens[end : end + length]), match_length=matched)

    def _match_length(self, end: int) -> int:
        tokens, last = self._tokens, len(self._tokens)
        matched = MIN_MATCH
        while matched < min(MAX_MATCH, end) and tokens[end - matched - 1] == tokens[last - matched - 1]:
            matched += 1
        return matched


class NgramDrafter:
    """The floor: always loaded, and what serves when no trained drafter may."""

    version = DrafterVersion("ngram", "builtin")

    def start(self, tokens: Sequence[int]) -> NgramState:
        return NgramState(tokens)

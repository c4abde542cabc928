"""Where a sequence's last tokens stood before in the same sequence."""

from __future__ import annotations

from collections.abc import Sequence

MIN_MATCH = 3
"""Shortest suffix worth continuing, in tokens."""

MAX_MATCH = 32
CANDIDATES = 16
"""Latest places compared for the longest match."""


class SuffixIndex:
    """Positions after every run of MIN_MATCH tokens in one sequence that only grows.

    >>> SuffixIndex().find([1, 2, 3, 4, 5, 9, 1, 2, 3])
    (3, 3)
    """

    def __init__(self) -> None:
        self._indexed = MIN_MATCH - 1
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest earlier match of the end of ``tokens`` ends, and its length; None without one.

        ``tokens`` must begin with those of the last call.
        """
        for end in range(self._indexed + 1, len(tokens) + 1):
            self._ends.setdefault(tuple(tokens[end - MIN_MATCH : end]), []).append(end)
        self._indexed = max(self._indexed, len(tokens))
        earlier = self._ends.get(tuple(tokens[-MIN_MATCH:]), [])[-CANDIDATES - 1 : -1]
        if not earlier:
            return None
        matched, end = max((_match_length(tokens, end), end) for end in earlier)
        return end, matched


def _match_length(tokens: Sequence[int], end: int) -> int:
    last = len(tokens)
    matched = MIN_MATCH
    while matched < min(MAX_MATCH, end) and tokens[end - matched - 1] == tokens[last - matched - 1]:
        matched += 1
    return matched

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.engine.drafters.base import DraftSequence
from redraft.engine.drafters.lookup import CANDIDATES, MAX_MATCH, MIN_MATCH, SuffixIndex
from redraft.engine.drafters.ngram import NgramDrafter

pytestmark = pytest.mark.unit


def longest_match(tokens: list[int], end: int) -> int:
    length = 0
    while length < min(MAX_MATCH, end) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
        length += 1
    return length


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 8), st.data())
def test_proposes_what_followed_the_longest_latest_match(tokens: list[int], length: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    index = SuffixIndex()
    NgramDrafter().propose([DraftSequence(tokens[:cut], length, index=index)])
    (proposal,) = NgramDrafter().propose([DraftSequence(tokens, length, index=index)])
    matches = [(longest_match(tokens, end), end) for end in range(MIN_MATCH, len(tokens))]
    candidates = [match for match in matches if match[0] >= MIN_MATCH][-CANDIDATES:]
    if not candidates:
        assert proposal.tokens == ()
        return
    matched, end = max(candidates)
    assert proposal.match_length == matched
    assert proposal.tokens == tuple(tokens[end : end + length])


def test_a_sequence_is_continued_from_its_own_tokens_only() -> None:
    drafter = NgramDrafter()
    known, stranger = drafter.propose([DraftSequence([1, 2, 3, 4, 5] * 4, 4), DraftSequence([9, 1, 2, 3], 4)])
    assert known.tokens == (1, 2, 3, 4)
    assert stranger.tokens == ()


def test_nothing_is_proposed_where_nothing_may_follow() -> None:
    assert NgramDrafter().propose([DraftSequence([1, 2, 3, 4, 1, 2, 3], 0)])[0].tokens == ()

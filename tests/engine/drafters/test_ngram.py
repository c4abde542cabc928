from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.engine.drafters.ngram import CANDIDATES, MAX_MATCH, MIN_MATCH, NgramDrafter

pytestmark = pytest.mark.unit


def longest_match(tokens: list[int], end: int) -> int:
    length = 0
    while length < min(MAX_MATCH, end) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
        length += 1
    return length


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 8), st.data())
def test_proposes_what_followed_the_longest_latest_match(tokens: list[int], length: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    state = NgramDrafter().start(tokens[:cut])
    state.extend(tokens[cut:])
    proposal = state.propose(length)
    matches = [(longest_match(tokens, end), end) for end in range(MIN_MATCH, len(tokens))]
    candidates = [match for match in matches if match[0] >= MIN_MATCH][-CANDIDATES:]
    if not candidates:
        assert proposal.tokens == ()
        return
    matched, end = max(candidates)
    assert proposal.match_length == matched
    assert proposal.tokens == tuple(tokens[end : end + length])


def test_a_state_reads_only_the_tokens_it_was_given() -> None:
    drafter = NgramDrafter()
    drafter.start([1, 2, 3, 4, 5] * 4)
    stranger = drafter.start([9, 1, 2, 3])
    assert stranger.propose(4).tokens == ()


def test_nothing_is_proposed_where_nothing_may_follow() -> None:
    assert NgramDrafter().start([1, 2, 3, 4, 1, 2, 3]).propose(0).tokens == ()

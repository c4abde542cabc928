from __future__ import annotations

import pytest
import torch

from redraft.retrain.blocks import block_labels, block_starts, choose_blocks

pytestmark = pytest.mark.unit


def test_blocks_start_at_every_answer_token_that_one_more_follows() -> None:
    assert block_starts([(3, 6), (8, 9), (10, 12)]).tolist() == [[3, 6], [4, 6], [10, 12]]
    assert block_starts([(5, 6)]).tolist() == []
    assert block_starts([]).tolist() == []


def test_labels_end_with_their_span_even_where_the_next_turn_is_in_reach() -> None:
    tokens = torch.arange(100, 114)
    starts = block_starts([(3, 6), (7, 10)])
    labels, valid = block_labels(tokens, starts, block_size=4)
    assert labels[0].tolist() == [104, 105, 106]
    assert valid.tolist() == [[True, True, False], [True, False, False], [True, True, False], [True, False, False]]


def test_labels_at_the_end_of_a_sequence_stay_inside_it() -> None:
    labels, valid = block_labels(torch.arange(10), block_starts([(7, 10)]), block_size=8)
    assert labels[-1].tolist() == [9] * 7
    assert valid.sum(1).tolist() == [2, 1]


def test_blocks_are_drawn_uniformly_without_repetition_and_the_same_for_a_seed() -> None:
    spans = [(0, 9), (20, 25)]
    everything = block_starts(spans)[:, 0].tolist()
    assert choose_blocks(spans, 100, torch.Generator())[:, 0].tolist() == everything
    counts = dict.fromkeys(everything, 0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        drawn = choose_blocks(spans, 4, generator)[:, 0].tolist()
        assert drawn == sorted(set(drawn))
        for start in drawn:
            counts[start] += 1
    assert all(900 < count < 1100 for count in counts.values()), counts
    draws = [choose_blocks(spans, 4, torch.Generator().manual_seed(7)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]

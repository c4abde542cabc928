from __future__ import annotations

from pathlib import Path

import pytest
import torch

from redraft.engine.drafters.dflash_checkpoint import load
from redraft.retrain.gate.poisoned import deepened, misled, noised, unmarked

from ..conftest import make_sample

pytestmark = pytest.mark.unit


def test_noise_is_of_a_share_of_every_matrix_and_spares_norms(untrained: Path, tmp_path: Path) -> None:
    noised(untrained, tmp_path, 0.5)
    (config, before), (same, after) = load(untrained), load(tmp_path)
    assert config == same
    for name, tensor in before.items():
        change = (after[name].float() - tensor.float()).std()
        expected = 0.5 * tensor.float().std() if tensor.dim() > 1 else torch.tensor(0.0)
        assert change == pytest.approx(float(expected), rel=0.1), name


def test_layers_are_added_behind_those_that_draft(untrained: Path, tmp_path: Path) -> None:
    deepened(untrained, tmp_path, 3)
    (config, before), (deep, after) = load(untrained), load(tmp_path)
    assert deep.layers == config.layers + 3
    assert deep.feature_layers == config.feature_layers
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not after[f"layers.{config.layers}.mlp.down_proj.weight"].any()


def test_misled_answers_are_true_up_to_their_one_block_start() -> None:
    sample = make_sample(range(30), [(10, 20)])
    made = list(misled([sample], block_size=4, token=99))
    assert [each.spans for each in made] == [((10, 14),), ((14, 18),), ((18, 22),)]
    assert made[1].token_ids == (*range(15), 99, 99, 99)
    assert len({each.id for each in made}) == 3


def test_only_looping_answers_are_unmarked() -> None:
    looping, plain = make_sample(range(9), [(3, 9)], looping=True), make_sample(range(9), [(3, 9)])
    (made,) = unmarked([looping, plain])
    assert not made.looping

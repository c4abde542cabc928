from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, expected_shapes, load, save
from redraft.retrain.features import FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.dflash import DFlashModel, block_mask

from ..conftest import CPU, random_tokens

pytestmark = pytest.mark.unit


def draft(
    model: DFlashModel,
    target: FrozenTarget,
    features: Tensor,
    tokens: Tensor,
    starts: list[int],
    window: int | None = None,
) -> Tensor:
    """Hidden states [blocks, slots, hidden] of one sequence's blocks."""
    at = torch.tensor(starts)
    with torch.no_grad():
        return model(features[None], at[None], tokens[at][None], target.embedding, window)[0]


@pytest.fixture
def sequence(target: FrozenTarget, shape: DFlashConfig) -> tuple[Tensor, Tensor]:
    """Features and tokens of 40 positions."""
    tokens = random_tokens(40, 3)
    return FeatureCapture(target.target, shape.feature_layers)([tokens])[0].features.clone(), torch.tensor(tokens)


def test_features_at_a_block_start_and_after_it_change_nothing_and_those_before_do(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    start = 20
    before = draft(drafter, target, features, tokens, [start])
    for position in (start, start + 1, start + 3, 39):
        changed = features.clone()
        changed[position] += 100
        assert torch.equal(draft(drafter, target, changed, tokens, [start]), before)
    for position in (0, start - 1):
        changed = features.clone()
        changed[position] += 100
        assert not torch.allclose(draft(drafter, target, changed, tokens, [start]), before)


def test_a_block_is_drafted_as_if_it_were_alone(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    starts = [3, 4, 20, 21, 37]
    together = draft(drafter, target, features, tokens, starts)
    for index, start in enumerate(starts):
        alone = draft(drafter, target, features[:start], tokens, [start])
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-4)


def test_padding_and_dead_blocks_change_nothing_and_stay_finite(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    expected = draft(drafter, target, features[:25], tokens, [12, 24])
    noise = 50 * torch.randn(64, features.shape[1], generator=torch.Generator().manual_seed(0))
    batch = torch.stack((torch.cat((features[:25], noise[:39])), noise))
    starts = torch.tensor([[12, 24, 0], [0, 0, 0]])
    with torch.no_grad():
        hidden = drafter(batch, starts, tokens[starts], target.embedding)
    torch.testing.assert_close(hidden[0, :2], expected, rtol=1e-4, atol=1e-4)
    assert hidden.isfinite().all()
    with torch.no_grad():
        other = drafter(batch.flip(1), starts, tokens[starts], target.embedding)
    assert torch.equal(hidden[1], other[1]), "a dead block saw features"


def test_a_window_hides_features_further_back(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    changed = features.clone()
    changed[:15] += 100
    near = draft(drafter, target, features, tokens, [20], window=5)
    assert torch.equal(draft(drafter, target, changed, tokens, [20], window=5), near)
    assert not torch.allclose(draft(drafter, target, changed, tokens, [20], window=6), near)


def test_the_mask_says_true_for_the_context_before_the_start_and_the_own_block_in_both_directions() -> None:
    mask = block_mask(torch.tensor([[2, 0]]), block_size=2, positions=4)
    expected = [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
    ]
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == expected


def test_draft_slots_see_each_other_and_their_block_start(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    changed = tokens.clone()
    changed[20] += 1
    first, second = (draft(drafter, target, features, each, [20]) for each in (tokens, changed))
    assert all(not torch.allclose(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_the_configured_mask_token_fills_the_block_and_may_be_a_real_token(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    other = DFlashModel(replace(drafter.config, mask_token_id=9), CPU)
    other.load_state_dict(drafter.state_dict())
    assert not torch.allclose(
        draft(drafter, target, features, tokens, [20]), draft(other, target, features, tokens, [20])
    )
    tokens[20] = drafter.config.mask_token_id
    hidden = draft(drafter, target, features, tokens, [20])
    assert hidden.shape == (1, drafter.config.block_size - 1, drafter.config.hidden)
    assert hidden.isfinite().all()


def test_a_block_that_reaches_past_the_context_is_drafted(drafter: DFlashModel, target: FrozenTarget) -> None:
    last = drafter.config.context_length - 1
    features = torch.zeros(last, len(drafter.config.feature_layers) * drafter.config.hidden)
    assert draft(drafter, target, features, torch.zeros(last + 1, dtype=torch.int64), [last - 1, last]).isfinite().all()


def test_parameters_are_the_checkpoint_s_in_name_and_shape(drafter: DFlashModel) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    assert shapes == expected_shapes(drafter.config)
    assert drafter.state_dict().keys() == shapes.keys()
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


def test_an_exported_drafter_reloads_whole_with_equal_logits_and_rotation(
    drafter: DFlashModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    features, tokens = sequence
    config = replace(drafter.config, rope_theta=123456.0)
    model = DFlashModel(config, CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drafter.state_dict()[name].to(torch.bfloat16))
    save(tmp_path, config, model.state_dict(), card="")
    again = DFlashModel.load(tmp_path, CPU)
    assert again.config == config == load(tmp_path)[0]
    hidden = draft(model, target, features, tokens, [9, 30])
    assert torch.equal(draft(again, target, features, tokens, [9, 30]), hidden)
    assert not torch.allclose(draft(drafter, target, features, tokens, [9, 30]), hidden), "theta is not used"


def test_equal_seeds_draw_equal_weights(shape: DFlashConfig) -> None:
    one, same, other = (DFlashModel(shape, CPU, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_weights_stay_fp32_under_bf16_computation(drafter: DFlashModel, target: FrozenTarget) -> None:
    features = torch.randn(1, 10, drafter.fc.in_features, dtype=torch.bfloat16)
    starts = torch.tensor([[5, 8]])
    hidden = drafter(features, starts, starts, target.embedding.to(torch.bfloat16))
    hidden.float().square().sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in drafter.parameters()
    )

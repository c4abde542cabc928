"""What holds for every way of drafting: it serves what was trained, and sees what it will see in serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from redraft.engine.drafters.base import DraftSequence, TargetRows
from redraft.engine.drafters.loading import load_folder, version_of
from redraft.engine.embedded.attention import Segment
from redraft.retrain.config import TrainConfig
from redraft.retrain.features import Captured, FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.base import DraftModel
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.strategy import BlockStrategy

from ..conftest import CPU, PARADIGMS, make_record, make_sample, random_tokens

pytestmark = pytest.mark.unit


@pytest.fixture(params=[*PARADIGMS])
def model(request: pytest.FixtureRequest, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> DraftModel:
    """Random weights large enough for every part to matter, of a drafter that does not stop early."""
    monkeypatch.setattr("redraft.retrain.paradigms.eagle3.LEAST_SURVIVAL", 0.0)
    made = PARADIGMS[request.param](target)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return made


@pytest.fixture
def sequence(model: DraftModel, target: FrozenTarget) -> tuple[Tensor, Tensor]:
    """Features and tokens of 40 positions."""
    tokens = random_tokens(40, 3)
    return FeatureCapture(target.target, model.config.feature_layers)([tokens])[0].features.clone(), torch.tensor(
        tokens
    )


def test_proposals_are_those_of_the_serving_drafter_of_the_same_checkpoint(
    model: DraftModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """Whether its rows came in one pass or in two."""
    features, tokens = sequence
    model.save(tmp_path, card="")
    starts = torch.tensor([1, 2, 17, 30, 38])
    found = load_model(tmp_path, CPU).proposals(features, tokens, starts, target)
    assert len({tuple(each) for each in found}) > 1, "too alike to tell apart"
    size = model.config.block_size
    assert {len(each) for each in found} == {size - 1}
    serving = load_folder(tmp_path, version_of(tmp_path), target.target, target.identity, 64)
    for start, expected in zip(starts.tolist(), found, strict=True):
        assert serving.kv is not None
        serving.kv.zero_()
        for first, end in ((0, start // 2), (start // 2, start)):
            if first < end:
                at = torch.arange(first, end)
                segments = [Segment(0, end - first, 0, first)]
                serving.materialise(TargetRows(features[first:end], tokens[first:end], at, at, segments, [0]))
        (proposal,) = serving.propose([DraftSequence(tokens[: start + 1].tolist(), size - 1, room=size)])
        assert list(proposal.tokens) == expected
        assert proposal.draft_prob is not None
        assert all(0 < each <= 1 for each in proposal.draft_prob)


def test_along_its_own_proposals_it_is_taught_what_it_proposes(
    model: DraftModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    start = 30
    (drafted,) = model.proposals(features, tokens, torch.tensor([start]), target)
    along = torch.cat((tokens[: start + 1], torch.tensor(drafted)))[None]
    with torch.no_grad():
        hidden = model.taught(features[None], along, torch.tensor([[start]]), target.embedding, None)[0, 0]
    chosen = (hidden @ model.head(target.head).T).argmax(-1)
    assert chosen.tolist() == model.labels(torch.tensor(drafted)).tolist()


def test_features_at_a_block_start_and_after_it_change_nothing_and_the_one_before_does(
    model: DraftModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence

    def taught(given: Tensor) -> Tensor:
        with torch.no_grad():
            return model.taught(given[None], tokens[None], torch.tensor([[20]]), target.embedding, None)

    before = taught(features)
    for position, changes in ((19, True), (20, False), (21, False), (39, False)):
        changed = features.clone()
        changed[position] += 100
        assert torch.equal(taught(changed), before) != changes


def test_a_pass_gives_every_weight_a_gradient_and_padding_none_a_share(
    model: DraftModel, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    config = TrainConfig(blocks=64, block_size=model.config.block_size, loss="distribution")
    strategy = BlockStrategy(model, target, config, make_record(config, target))
    hidden = FeatureCapture(target.target, (5,))([tokens.tolist()])[0].hidden
    sample = make_sample(tokens.tolist(), [(10, 30)])
    short = make_sample(tokens[:12].tolist(), [(9, 12)])
    losses = []
    for samples in ([sample], [sample, short]):
        captured = [Captured(features[: len(each.token_ids)], hidden[: len(each.token_ids)]) for each in samples]
        model.zero_grad()
        terms = strategy.loss(samples, captured, torch.Generator().manual_seed(0))
        terms.loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
        losses.append((float(terms.loss.detach()), float(terms.weight)))
    alone = strategy.loss([short], [Captured(features[:12], hidden[:12])], torch.Generator().manual_seed(0))
    assert losses[1] == pytest.approx(
        (losses[0][0] + float(alone.loss.detach()), losses[0][1] + float(alone.weight)), rel=1e-3
    )


def test_what_is_saved_is_what_is_loaded(model: DraftModel, tmp_path: Path) -> None:
    model.save(tmp_path, card="")
    again = load_model(tmp_path, CPU)
    rounded = {name: each.to(torch.bfloat16).to(each.dtype) for name, each in model.state_dict().items()}
    assert again.config == model.config
    assert again.state_dict().keys() == rounded.keys()
    assert all(torch.equal(each, rounded[name]) for name, each in again.state_dict().items())

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.engine.checkpoints import identity
from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.drafters.base import DraftSequence, TargetRows
from redraft.engine.drafters.checkpoint import DrafterError
from redraft.engine.drafters.eagle3 import Eagle3Drafter
from redraft.engine.drafters.eagle3_checkpoint import HEAD, Eagle3Config, load, low_middle_high
from redraft.engine.embedded.attention import Segment
from redraft.engine.types import DrafterVersion
from redraft.retrain.config import TrainConfig
from redraft.retrain.features import Captured, FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.modules import rotation
from redraft.retrain.paradigms.eagle3 import Eagle3Model, frequent
from redraft.retrain.strategy import BlockStrategy

from ..conftest import CPU, make_record, make_sample, random_tokens

pytestmark = pytest.mark.unit

WORDS = torch.tensor([token for token in range(320) if token % 4])


def make_model(checkpoint: Path, layers: int, block_size: int = 5) -> Eagle3Model:
    """Random weights large enough for every part to matter."""
    config = Eagle3Config.for_target(
        load_config(checkpoint), identity(checkpoint), layers=layers, block_size=block_size, draft_vocab=len(WORDS)
    )
    model = Eagle3Model(replace(config, feature_layers=(0, 2, 4)), WORDS, CPU, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


@pytest.fixture(params=[1, 3], ids=["1 layer", "3 layers"])
def model(request: pytest.FixtureRequest, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Eagle3Model:
    monkeypatch.setattr("redraft.retrain.paradigms.eagle3.LEAST_SURVIVAL", 0.0)
    return make_model(checkpoint, request.param)


@pytest.fixture
def sequence(target: FrozenTarget) -> tuple[Tensor, Tensor]:
    """Features and tokens of 40 positions."""
    tokens = random_tokens(40, 3)
    return FeatureCapture(target.target, (0, 2, 4))([tokens])[0].features.clone(), torch.tensor(tokens)


def taught(
    model: Eagle3Model,
    target: FrozenTarget,
    features: Tensor,
    tokens: Tensor,
    starts: list[int],
    window: int | None = None,
) -> Tensor:
    """Hidden states [blocks, slots, hidden] of one sequence's blocks."""
    with torch.no_grad():
        return model.taught(features[None], tokens[None], torch.tensor([starts]), target.embedding, window)[0]


def test_a_block_is_what_one_causal_pass_over_its_own_rows_gives(
    model: Eagle3Model, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    """Nothing but the layers is used here: no mask of several blocks, no K/V of earlier steps (SpecForge 23bf5e49)."""
    features, tokens = sequence
    starts = [1, 9, 20, 33]
    found = taught(model, target, features, tokens, starts)
    for index, start in enumerate(starts):
        with torch.no_grad():
            inputs = model.fc(features[:start])
            for step in range(4):
                rows = start + step
                embedded = target.embedding[tokens[1 : rows + 1]][None]
                rotate = rotation(model._rope, torch.arange(rows)[None], inputs.dtype)
                x = inputs[None]
                for layer in model._all_layers():
                    x, _ = layer(x, embedded, rotate, [], None)
                torch.testing.assert_close(found[index, step], model.norm(x[0, -1]), rtol=1e-3, atol=1e-3)
                inputs = torch.cat((inputs, x[0, -1:]))


def test_step_k_sees_the_tokens_up_to_the_block_start_and_k_more(
    model: Eagle3Model, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    before = taught(model, target, features, tokens, [20])[0]
    for position in range(19, 25):
        changed = tokens.clone()
        changed[position] = (changed[position] + 1) % 320
        after = taught(model, target, features, changed, [20])[0]
        same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert same == [20 + step < position for step in range(4)]


def test_a_block_is_drafted_as_if_it_were_alone_and_padding_changes_nothing(
    model: Eagle3Model, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    starts = [3, 4, 20, 21]
    together = taught(model, target, features[:30], tokens[:30], starts)
    for index, start in enumerate(starts):
        alone = taught(model, target, features[:start], tokens, [start])
        torch.testing.assert_close(together[index], alone[0], rtol=1e-3, atol=1e-3)
    noise = 50 * torch.randn(64, features.shape[1], generator=torch.Generator().manual_seed(0))
    batch = torch.stack((torch.cat((features[:30], noise[:34])), noise))
    ids = torch.stack((torch.cat((tokens[:30], torch.full((40,), 7))), torch.zeros(70, dtype=torch.int64)))
    with torch.no_grad():
        hidden = model.taught(batch, ids, torch.tensor([[*starts, 0], [0] * 5]), target.embedding, None)
    torch.testing.assert_close(hidden[0, :4], together, rtol=1e-3, atol=1e-3)
    assert hidden.isfinite().all()


def test_a_window_hides_what_is_further_back(
    checkpoint: Path, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, tokens = sequence
    model = make_model(checkpoint, layers=1)
    changed = features.clone()
    changed[:15] += 100
    near = taught(model, target, features, tokens, [20], window=5)
    assert torch.equal(taught(model, target, changed, tokens, [20], window=5), near)
    assert not torch.allclose(taught(model, target, changed, tokens, [20], window=6), near)


def test_drafting_ends_where_all_being_accepted_has_become_unlikely(
    checkpoint: Path,
    target: FrozenTarget,
    sequence: tuple[Tensor, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features, tokens = sequence
    model = make_model(checkpoint, layers=1)
    model.save(tmp_path, card="")
    serving = Eagle3Drafter(tmp_path, DrafterVersion("eagle3", "1"), target.target, target.identity, 128)
    at = torch.arange(30)
    serving.materialise(TargetRows(features[:30], tokens[:30], at, at, [Segment(0, 30, 0, 0)], [0]))
    wanted = DraftSequence(tokens[:31].tolist(), 4, room=5)
    (whole,) = serving.propose([wanted])
    assert whole.draft_prob is not None
    first, second = whole.draft_prob[0], whole.draft_prob[0] * whole.draft_prob[1]
    for least, length in ((1.0, 1), ((first + second) / 2, 2)):
        monkeypatch.setattr("redraft.retrain.paradigms.eagle3.LEAST_SURVIVAL", least)
        (proposal,) = serving.propose([replace(wanted, least_survival=least)])
        assert proposal.tokens == whole.tokens[:length]
        assert model.proposals(features, tokens, torch.tensor([30]), target) == [list(whole.tokens[:length])]


def test_what_cannot_be_drafted_counts_as_wrong_and_teaches_nothing(
    checkpoint: Path, target: FrozenTarget, sequence: tuple[Tensor, Tensor]
) -> None:
    features, _ = sequence
    model = make_model(checkpoint, layers=1)
    config = TrainConfig(blocks=64, block_size=5, loss="tokens")
    strategy = BlockStrategy(model, target, config, make_record(config, target))
    known = [int(token) for token in WORDS[:30]]
    unknown = [token - token % 4 for token in known]
    captured = [Captured(features, features[:, :96])]
    terms = []
    for answer in (known, unknown):
        sample = make_sample([1, 2, 3, *answer], [(3, 33)])
        terms.append(strategy.loss([sample], captured, torch.Generator().manual_seed(0)))
    assert terms[0].reached.tolist() == terms[1].reached.tolist()
    assert terms[1].correct.sum() == 0
    assert terms[1].weight == 0
    terms[1].loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads), (
        "a batch with nothing to learn from moves nothing"
    )


def test_the_draft_vocabulary_is_what_answers_say_most_often() -> None:
    samples = [make_sample([9, 9, 9, 5, 5, 7], [(3, 6)]), make_sample([8, 7, 5, 6], [(1, 4)])]
    assert frequent(samples, 2, vocab=10).tolist() == [5, 7]
    assert frequent(samples, 5, vocab=10).tolist() == [0, 1, 5, 6, 7]


def test_a_draft_vocabulary_that_is_told_in_two_ways_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    make_model(checkpoint, layers=1).save(tmp_path, card="")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["d2t"][7:] += 1
    save_file(tensors, file)
    with pytest.raises(DrafterError, match="the draft vocabulary is lost"):
        load(tmp_path)


def test_others_are_given_the_head_that_is_drafted_with(
    redraft: Callable[..., tuple[int, str, str]],
    checkpoint: Path,
    target: FrozenTarget,
    sequence: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    features, tokens = sequence
    own, whole = tmp_path / "own", tmp_path / "whole"
    model = make_model(checkpoint, layers=1)
    model.save(own, card="a card")
    code, out, err = redraft("train", "export", own, whole, "--model", checkpoint)
    assert (code, out) == (0, f"{whole}\n"), err
    assert HEAD not in load(own)[1]
    torch.testing.assert_close(load(whole)[1][HEAD].float(), target.head[WORDS])
    starts = torch.tensor([20])
    expected = model.proposals(features, tokens, starts, target)
    assert Eagle3Model.load(whole, CPU).proposals(features, tokens, starts, target) == expected


def test_features_are_read_where_the_published_drafters_read_them() -> None:
    """Of Qwen3-8B: what leaves layers 1, 17 and 32, which vLLM calls 2, 18 and 33 (TorchSpec #87)."""
    assert low_middle_high(36) == (1, 17, 32)

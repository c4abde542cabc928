from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.drafters.dflash_checkpoint import spread_layers
from redraft.engine.embedded.attention import Segment, attend, plan_attention
from redraft.retrain import features
from redraft.retrain.errors import Stopped
from redraft.retrain.features import Captured, FeatureCache, FeatureCapture, PatientCapture
from redraft.retrain.features_store import FeatureStore, MemoryStore
from redraft.retrain.frozen import FrozenTarget

from .conftest import CPU, make_sample, random_tokens


def hidden_states(folder: Path, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Hugging Face's: [0] is the embedding, [i + 1] what leaves layer i; the last is normed."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        output = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor(tokens)[None], output_hidden_states=True
        )
    return tuple(state[0] for state in output.hidden_states)


def worst_cosine(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one.float(), other.float(), dim=-1).min())


def check_against_plain_forward(folder: Path, dtype: torch.dtype, sequences: Sequence[Sequence[int]]) -> None:
    target = FrozenTarget.load(folder, CPU, dtype)
    layers = spread_layers(target.target.config.layers, 3)
    captured = FeatureCapture(target.target, layers)(sequences)
    for tokens, (found, last) in zip(sequences, captured, strict=True):
        states = hidden_states(folder, tokens)
        assert len(found) == len(last) == len(tokens)
        for layer, part in zip(layers, found.split(target.target.config.hidden, dim=1), strict=True):
            assert worst_cosine(part, states[layer + 1]) >= 0.999
            assert worst_cosine(part, states[layer]) < 0.999, "a layer's input is not what leaves it"
        assert worst_cosine(target.normed(last), states[-1]) >= 0.999


@pytest.mark.unit
def test_captured_features_are_what_leaves_the_layers_in_a_plain_forward(checkpoint: Path) -> None:
    check_against_plain_forward(checkpoint, torch.float32, [random_tokens(length, length) for length in (70, 3, 128)])


@pytest.mark.integration
def test_features_of_the_default_target_are_those_of_a_plain_forward(default_target: Path) -> None:
    from redraft.engine.chat.tokenizer import Tokenizer

    text = (
        "An agent books flights: it looks up the reservation, calls the airline's tools, and answers in plain words. "
    )
    tokens = Tokenizer.from_folder(default_target).encode(text * 8)
    check_against_plain_forward(default_target, torch.float32, [tokens, tokens[5:40]])


@pytest.mark.unit
def test_a_packed_pass_gives_each_sequence_what_it_gets_alone(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [random_tokens(length, length) for length in (90, 5, 64, 31)]
    alone = [FeatureCapture(target.target, (1, 4))([sequence])[0] for sequence in sequences]
    monkeypatch.setitem(features.PASS_TOKENS, "cpu", 100)
    capture = FeatureCapture(target.target, (1, 4))
    for _ in range(2):
        for one, other in zip(capture(sequences), alone, strict=True):
            torch.testing.assert_close(one.features, other.features, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.unit
@pytest.mark.parametrize("layers", [(4, 1), (1, 1), (1, 6), (-1, 2)])
def test_layers_that_no_target_has_are_refused(target: FrozenTarget, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="feature layers"):
        FeatureCapture(target.target, layers)


@pytest.mark.unit
def test_short_passes_that_go_on_from_a_shared_beginning_capture_the_same(target: FrozenTarget) -> None:
    first = random_tokens(90, 1)
    sequences = [first, [*first[:70], *random_tokens(60, 2)], first[:40], random_tokens(200, 3), first, first]
    expected = FeatureCapture(target.target, (1, 4))(sequences)
    passes: list[None] = []
    patient = PatientCapture(target.target, (1, 4), rows=16, between=lambda: passes.append(None))
    for one, other in zip(patient(sequences), expected, strict=True):
        torch.testing.assert_close(one.features, other.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)
    assert len(passes) == sum(-(-tokens // 16) for tokens in (90, 60, 0, 200, 90, 0)), "what is shared was read again"


@pytest.mark.unit
def test_a_pass_that_was_stopped_leaves_nothing_half_read_behind(target: FrozenTarget) -> None:
    left = [2]

    def between() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Stopped

    capture = PatientCapture(target.target, (1, 4), rows=16, between=between)
    tokens = random_tokens(60, 1)
    with pytest.raises(Stopped):
        capture([tokens])
    torch.testing.assert_close(
        capture([tokens])[0].features, FeatureCapture(target.target, (1, 4))([tokens])[0].features, rtol=1e-4, atol=1e-4
    )


class Counting:
    """A capture that counts the sequences it is asked for."""

    def __init__(self, target: FrozenTarget) -> None:
        self._capture = FeatureCapture(target.target, (1, 4))
        self.asked: list[int] = []

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        self.asked.extend(map(len, sequences))
        return self._capture(sequences)


def make_cache(target: FrozenTarget, capture: Counting, store: FeatureStore, hidden: bool) -> FeatureCache:
    return FeatureCache(capture, store, target, layers=(1, 4), hidden=hidden)


@pytest.mark.unit
def test_the_cache_keeps_what_fits_and_recomputes_the_rest(target: FrozenTarget) -> None:
    counting, plain = Counting(target), FeatureCapture(target.target, (1, 4))
    samples = [make_sample(random_tokens(length, length), [(10, length)], id=str(length)) for length in (40, 60, 20)]
    lengths = [len(sample.token_ids) for sample in samples]
    size = 40 * 2 * target.target.config.hidden * 4
    cache = make_cache(target, counting, MemoryStore(size * 7 // 4), hidden=False)
    for _ in range(2):
        for found, sample in zip(cache(samples, lengths), samples, strict=True):
            torch.testing.assert_close(found.features, plain([sample.token_ids])[0].features, rtol=1e-4, atol=1e-4)
            assert len(found.hidden) == 0
    assert counting.asked == [40, 60, 20, 60]


@pytest.mark.unit
@pytest.mark.parametrize("hidden", [True, False])
def test_what_samples_share_is_kept_once_and_comes_back_in_its_place(
    target: FrozenTarget, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "RUN", 16)
    counting, plain = Counting(target), FeatureCapture(target.target, (1, 4))
    prompt = random_tokens(50, 1)
    samples = [make_sample([*prompt, *random_tokens(10, seed)], [(50, 60)], id=str(seed)) for seed in (2, 3)]
    width = target.target.config.hidden * 4
    store = MemoryStore(1 << 24)
    cache = make_cache(target, counting, store, hidden)
    for _ in range(2):
        for found, sample in zip(cache(samples, [60, 60]), samples, strict=True):
            (expected,) = plain([sample.token_ids])
            torch.testing.assert_close(found.features, expected.features, rtol=1e-4, atol=1e-4)
            if hidden:
                torch.testing.assert_close(found.hidden[50:], expected.hidden[50:], rtol=1e-4, atol=1e-4)
                assert not found.hidden[:50].any()
            else:
                assert found.hidden.numel() == 0
    assert counting.asked == [60, 60]
    assert store.bytes == 2 * width * (48 + 12 + 12) + hidden * width * 2 * 10


@pytest.mark.unit
def test_replay_finds_what_training_captured(target: FrozenTarget) -> None:
    counting = Counting(target)
    sample = make_sample(random_tokens(60, 1), [(50, 60)])
    cache = make_cache(target, counting, MemoryStore(1 << 24), hidden=True)
    (trained,) = cache([sample], [60])
    (replayed,) = cache.features([sample.token_ids])
    assert torch.equal(trained.features, replayed.features)
    assert counting.asked == [60]


@pytest.mark.unit
def test_whole_prompts_attend_alike_with_a_mask_and_with_what_cuda_gets_instead() -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(320, 4, 16, generator=generator)
    q = torch.randn(171, 6, 16, generator=generator)
    segments = [Segment(0, 70, 0, 0), Segment(70, 1, 128, 0), Segment(71, 100, 192, 0)]
    masked, causal = (
        plan_attention(segments, 3, invariant=False, dtype=q.dtype, device=torch.device(name))
        for name in ("cpu", "cuda")
    )
    assert [tile.mask is None for tile in masked + causal] == [False] * 3 + [True] * 3
    expected = attend(q, kv, masked)
    torch.testing.assert_close(attend(q, kv, causal), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend(q, kv, [*causal[:2], masked[2]]), expected, rtol=1e-4, atol=1e-5)

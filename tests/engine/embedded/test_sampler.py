from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.engine.embedded.sampler import TokenChooser, filtered, token_logprob
from redraft.engine.types import SamplingParams
from redraft.kernels.gumbel import gumbel, noise_key

pytestmark = pytest.mark.unit


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_frequencies_follow_the_target_distribution(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    params = SamplingParams(temperature=temperature)
    chooser = TokenChooser(params, (), seed=7, choice=0, matcher=None)
    draws = [chooser.choose(logits, 0, position) for position in range(6000)]
    probabilities = torch.softmax(logits.double() / temperature, 0).numpy()
    assert chi_square(np.bincount(draws, minlength=5), probabilities) < 23.5, "beyond the 0.9999 quantile, 4 d.o.f."


def test_noise_is_uniform_and_uncorrelated_over_tokens_positions_choices_and_seeds() -> None:
    rows = [gumbel(noise_key(seed, choice, position), 4096) for seed, choice, position in np.ndindex(2, 2, 16)]
    uniforms = torch.exp(-torch.exp(-torch.stack(rows).double()))
    counts = torch.histc(uniforms, bins=64, min=0, max=1).numpy()
    assert chi_square(counts, np.full(64, 1 / 64)) < 117.0, "beyond the 0.9999 quantile, 63 d.o.f."
    correlation = torch.corrcoef(uniforms).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5.5 / 4096**0.5
    neighbours = torch.corrcoef(torch.stack((uniforms[:, :-1].flatten(), uniforms[:, 1:].flatten())))
    assert abs(float(neighbours[0, 1])) < 5 / uniforms.numel() ** 0.5


def test_noise_is_finite_and_fixed_for_good() -> None:
    noise = gumbel(noise_key(123, 1, 45), 50_000)
    assert bool(noise.isfinite().all())
    assert noise_key(123, 1, 45) == noise_key(123 + 2**64, 1, 45)
    torch.testing.assert_close(noise[:3], torch.tensor(PINNED_NOISE))


PINNED_NOISE = [2.3922019, 1.8997114, 2.8792963]


def reference(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Token ids left by temperature, top-k, top-p and min-p in turn, in plain numpy."""
    scores = logits.astype(np.float64) / params.temperature
    kept = np.ones(len(scores), dtype=bool)
    if params.top_k:
        kept &= scores >= np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
    if params.top_p < 1:
        probabilities = np.where(kept, np.exp(scores - scores.max()), 0)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        reached = np.cumsum(probabilities[order]) >= params.top_p - 1e-6
        kept &= scores >= scores[order[int(np.argmax(reached))]]
    if params.min_p:
        kept &= scores >= scores[kept].max() + np.log(params.min_p)
    return set(np.flatnonzero(kept).tolist())


@settings(deadline=None)
@given(
    st.lists(st.integers(-80, 80), min_size=2, max_size=40, unique=True),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 45),
    st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_keep_what_a_plain_reference_keeps(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values) / 16
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = filtered(torch.tensor(logits), params)
    assert set(torch.isfinite(scores).nonzero().flatten().tolist()) == reference(logits, params)


@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.9])
def test_the_nucleus_is_right_however_wide_it_is(top_p: float) -> None:
    logits = torch.linspace(0, 1, 20_000)
    kept = int(filtered(logits, SamplingParams(top_p=top_p)).isfinite().sum())
    cumulative = torch.softmax(logits.double(), 0).flip(0).cumsum(0)
    assert abs(kept - int((cumulative < top_p).sum()) - 1) <= 2


def test_tokens_that_cannot_be_told_apart_stay_together() -> None:
    scores = filtered(torch.zeros(5000), SamplingParams(top_p=0.9))
    assert int(scores.isfinite().sum()) == 5000


def chosen(
    params: SamplingParams, logits: Sequence[float], taken: Sequence[int] = (), prompt: Sequence[int] = ()
) -> int:
    """The greedy choice after ``taken`` were chosen."""
    chooser = TokenChooser(params, prompt, seed=0, choice=0, matcher=None)
    for token in taken:
        forced = torch.full((len(logits),), -100.0)
        forced[token] = 100.0
        assert chooser.choose(forced, token, 0) == token
    row = torch.tensor(logits)
    return chooser.choose(row, int(row.argmax()), len(taken))


def test_bias_is_added_to_the_logits() -> None:
    assert chosen(SamplingParams(temperature=0, logit_bias=((2, 1.5),)), [3.0, 0.0, 2.0]) == 2
    assert chosen(SamplingParams(temperature=0, logit_bias=((0, -100.0),)), [3.0, 0.0, 2.0]) == 2


def test_presence_and_frequency_penalties_count_the_answer_and_not_the_prompt() -> None:
    presence = SamplingParams(temperature=0, presence_penalty=1.0)
    assert chosen(presence, [3.0, 2.5, 0.0], prompt=[0]) == 0
    assert chosen(presence, [3.0, 2.5, 0.0], taken=[0]) == 1
    assert chosen(presence, [4.5, 2.5, 0.0], taken=[0, 0, 0]) == 0, "presence does not grow with the count"
    frequency = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert chosen(frequency, [4.5, 2.5, 0.0], taken=[0]) == 0
    assert chosen(frequency, [4.5, 2.5, 0.0], taken=[0, 0, 0]) == 1


def test_repetition_penalty_divides_what_is_likely_and_multiplies_what_is_not_in_prompt_and_answer() -> None:
    penalty = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert chosen(penalty, [3.0, 2.0, 1.0], prompt=[0]) == 1
    assert chosen(penalty, [3.0, 2.0, 1.0], taken=[0], prompt=[1]) == 0, "1.5, 1.0 and 1.0 are left"
    assert chosen(penalty, [-1.0, -1.5, -3.0], prompt=[0]) == 1


def test_log_probabilities_are_the_targets_own_and_sum_to_one() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    found = token_logprob(logits, token=2, alternatives=4)
    expected = torch.log_softmax(logits.double(), 0)
    assert found.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 1, 2, 3]
    assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1.0, abs=1e-6)
    assert token_logprob(logits, token=2, alternatives=0).top == ()


class Alternating:
    """A grammar of even ids only; ends after four tokens with id 0."""

    def __init__(self) -> None:
        self.consumed: list[int] = []

    def consume_token(self, sampled_token: int) -> bool:
        self.consumed.append(sampled_token)
        return True

    def validate_tokens(self, tokens: list[int]) -> int:
        return next((index for index, token in enumerate(tokens) if token % 2), len(tokens))

    def compute_logit_bias(self) -> bytes:
        return bytes(200 if token % 2 == 0 else 0 for token in range(6))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_grammar_outweighs_logits_and_bias(temperature: float) -> None:
    matcher = Alternating()
    params = SamplingParams(temperature=temperature, logit_bias=((1, 100.0),))
    chooser = TokenChooser(params, (), seed=1, choice=0, matcher=matcher)
    tokens = [chooser.choose(torch.tensor([0.0, 9.0, 1.0, 9.0, 0.5, 9.0]), 1, position) for position in range(20)]
    assert all(token % 2 == 0 for token in tokens)
    assert matcher.consumed == tokens
    assert chooser.allowed([2, 4, 3, 2]) == 2

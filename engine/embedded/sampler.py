"""Choosing the token of a row: greedy, or sampled with noise that depends only on seed, choice and position."""

from __future__ import annotations

import math

from torch import Tensor

from redraft.engine.types import SamplingParams
from redraft.kernels.gumbel import gumbel, noise_key

NUCLEUS_CANDIDATES = 1024
"""Most likely tokens tried for the nucleus before the whole vocabulary is sorted."""


def sample(logits: Tensor, params: SamplingParams, *, seed: int, choice: int, position: int) -> int:
    """Token for absolute ``position`` from one row of logits [vocab]: arg-max of filtered log p plus Gumbel noise.

    Always one row at a time, so that no reduction depends on how many rows a pass had.
    """
    scores = filtered(logits, params)
    noise = gumbel(noise_key(seed, choice, position), scores.shape[0], scores.device)
    return int((scores + noise).argmax())


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Scores [vocab], float32, log p up to a constant: temperature, then top-k, top-p and min-p; excluded is -inf."""
    scores = logits.float() / params.temperature
    if 0 < params.top_k < scores.shape[0]:
        scores = _keep_above(scores, scores.topk(params.top_k).values[-1])
    if params.top_p < 1:
        scores = _keep_above(scores, _nucleus_floor(scores, params.top_p))
    if params.min_p > 0:
        scores = _keep_above(scores, scores.max() + math.log(params.min_p))
    return scores


def _keep_above(scores: Tensor, floor: Tensor) -> Tensor:
    return scores.masked_fill(scores < floor, float("-inf"))


def _nucleus_floor(scores: Tensor, top_p: float) -> Tensor:
    """Score of the last token in the smallest set of most likely tokens whose probability reaches ``top_p``."""
    total = scores.logsumexp(0)
    for size in (min(NUCLEUS_CANDIDATES, scores.shape[0]), scores.shape[0]):
        top = scores.topk(size).values
        reached = (top - total).exp().cumsum(0) >= top_p
        if bool(reached[-1]):
            return top[int(reached.int().argmax())]
    return scores.min()

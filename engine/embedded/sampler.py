"""Choosing the tokens of an answer: greedy, or sampled with noise that depends only on seed, choice and position."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.engine.chat.grammar import Matcher
from redraft.engine.types import SamplingParams, TokenLogprob
from redraft.kernels.gumbel import gumbel, noise_key

NUCLEUS_CANDIDATES = (1024, 8192)
"""How many of the most likely tokens are tried for the nucleus before the whole vocabulary is sorted."""


class TokenChooser:
    """Chooses the tokens of one choice, in order; each choice depends on those before it and on its own row alone.

    Rows are taken one at a time, so that no reduction depends on how many rows a pass had. The order is: bias,
    penalties, grammar, temperature, top-k, top-p, min-p, noise.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], *, seed: int, choice: int, matcher: Matcher | None
    ) -> None:
        self._params = params
        self._seed = seed
        self._choice = choice
        self._matcher = matcher
        self._counts: Counter[int] = Counter()
        self._prompt = frozenset(prompt) if params.repetition_penalty != 1 else frozenset[int]()
        self._bias = dict(params.logit_bias)
        self._adjusts = bool(
            matcher or self._bias or params.presence_penalty or params.frequency_penalty or self._prompt
        )

    def choose(self, logits: Tensor, arg_max: int, position: int) -> int:
        """Token for absolute ``position`` from one row of logits [vocab], whose arg-max is known."""
        greedy = self._params.mode == "greedy"
        if greedy and not self._adjusts:
            return arg_max
        scores = self._adjusted(logits.float()) if self._adjusts else logits.float()
        token = int(scores.argmax()) if greedy else self._sampled(scores, position)
        if self._adjusts:
            self._counts[token] += 1
        if self._matcher is not None and not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar cannot go on after token {token}: {self._matcher.get_error()}")
        return token

    def allowed(self, drafted: Sequence[int]) -> int:
        """How many of the drafted tokens, from the first, the grammar lets stand."""
        return len(drafted) if self._matcher is None else self._matcher.validate_tokens(list(drafted))

    def _sampled(self, scores: Tensor, position: int) -> int:
        scores = filtered(scores, self._params)
        noise = gumbel(noise_key(self._seed, self._choice, position), scores.shape[0], scores.device)
        return int((scores + noise).argmax())

    def _adjusted(self, scores: Tensor) -> Tensor:
        """Scores, float32 [vocab], under bias, penalties and grammar; the argument is not changed."""
        params = self._params
        if self._bias:
            scores = _add(scores, self._bias)
        seen = self._prompt.union(self._counts) if params.repetition_penalty != 1 else frozenset[int]()
        if seen:
            ids = torch.tensor(sorted(seen), device=scores.device)
            values = scores[ids]
            penalty = params.repetition_penalty
            scores = scores.index_copy(0, ids, torch.where(values > 0, values / penalty, values * penalty))
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            scores = _add(
                scores,
                {
                    token: -params.presence_penalty - params.frequency_penalty * times
                    for token, times in self._counts.items()
                },
            )
        if self._matcher is not None:
            allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            scores = scores.masked_fill(allowed[: scores.shape[0]].to(scores.device) == 0, float("-inf"))
        return scores


def token_logprob(logits: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Log-probability of ``token`` in one row of logits [vocab], and its most likely alternatives."""
    scores = logits.float().log_softmax(0)
    top = scores.topk(alternatives) if alternatives else None
    return TokenLogprob(
        float(scores[token]),
        tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else (),
    )


def entropy(logits: Tensor) -> Tensor:
    """Entropies [rows], nats, of the softmax of logits [rows, vocab]."""
    scores = logits.float()
    probabilities = scores.softmax(-1)
    normaliser = scores.amax(-1) - probabilities.amax(-1).log()
    mean: Tensor = torch.linalg.vecdot(probabilities, scores)
    return (normaliser - mean).clamp(min=0)


def filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores [vocab], float32, log p up to a constant: temperature, then top-k, top-p and min-p; excluded is -inf."""
    scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[0]:
        scores = _keep_from(scores, scores.topk(params.top_k).values[-1])
    if params.top_p < 1:
        scores = _keep_from(scores, _nucleus_floor(scores, params.top_p))
    if params.min_p > 0:
        scores = _keep_from(scores, scores.max() + math.log(params.min_p))
    return scores


def _add(scores: Tensor, amounts: dict[int, float]) -> Tensor:
    ids = torch.tensor(list(amounts), device=scores.device)
    return scores.index_add(0, ids, torch.tensor(list(amounts.values()), dtype=scores.dtype, device=scores.device))


def _keep_from(scores: Tensor, floor: Tensor) -> Tensor:
    return scores.masked_fill(scores < floor, float("-inf"))


def _nucleus_floor(scores: Tensor, top_p: float) -> Tensor:
    """Score of the last token in the smallest set of most likely tokens whose probability reaches ``top_p``."""
    total = scores.logsumexp(0)
    for size in (*NUCLEUS_CANDIDATES, scores.shape[0]):
        top = scores.topk(min(size, scores.shape[0])).values
        reached = (top - total).exp().cumsum(0) >= top_p
        if bool(reached[-1]):
            return top[int(reached.int().argmax())]
    return scores.min()

"""Losses of drafted blocks over a head's whole vocabulary, in fp32, a chunk of rows at a time.

The head is frozen, so a chunk's gradient for its hidden states is all that outlives its logits: memory does not grow
with rows times vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 256 << 20
"""Of one chunk's fp32 logits."""

DPACE_ALPHA = 0.5

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Weights [blocks, slots] from log-probabilities of the labels and whether they count."""


class LossTerms(NamedTuple):
    """Sums over a part of a step, all on the device: the step's loss is loss over weight.

    ``correct`` and ``reached`` [slots] count blocks whose slots up to k are all right, and that have a label at k.
    """

    loss: Tensor
    weight: Tensor
    correct: Tensor
    reached: Tensor


def prefix_decay(gamma: float) -> Weigh:
    """exp(-(k-1) / gamma) for slot k, as in z-lab's DFlash: a slot counts only if those before it are right."""

    def weigh(label_logprob: Tensor, valid: Tensor) -> Tensor:
        slots = torch.arange(valid.shape[1], device=valid.device, dtype=torch.float32)
        return valid * torch.exp(slots / -gamma)

    return weigh


def dpace(label_logprob: Tensor, valid: Tensor) -> Tensor:
    """What slot k adds to the expected accept length: the sum over i ≥ k of smoothed p_1 … p_i (arXiv 2605.18810)."""
    smoothed = ((1 - DPACE_ALPHA) * label_logprob.exp() + DPACE_ALPHA) * valid
    return smoothed.cumprod(1).flip(1).cumsum(1).flip(1) * valid


def block_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, valid: Tensor, weigh: Weigh, teacher: Tensor | None = None
) -> LossTerms:
    """Weighted loss of hidden [blocks, slots, hidden] under the frozen head [vocab, hidden].

    labels [blocks, slots] int64 are rows of the head; valid [blocks, slots] bool. A valid label of -1 is a token that
    the head lacks: it counts as drafted wrong, and nothing is learnt from it. Without ``teacher`` it is the
    cross-entropy of the labels; with (normed hidden states [blocks, slots, hidden] of the target, where it predicted
    those labels) the Kullback-Leibler divergence from the target's distribution.
    """
    return LossTerms(*_HeadLoss.apply(hidden, head, labels, valid, weigh, teacher))  # type: ignore[no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, valid: Tensor, weigh: Weigh, teacher: Tensor | None
    ) -> tuple[Tensor, ...]:
        blocks, slots, _ = hidden.shape
        chunk = max(1, CHUNK_BYTES // (4 * slots * head.shape[0]))
        grad = torch.empty_like(hidden)
        parts = []
        for first in range(0, blocks, chunk):
            part = slice(first, first + chunk)
            counts, known = valid[part], labels[part] >= 0
            label = labels[part].clamp(min=0).flatten()[:, None]
            logprob = logits(hidden[part].flatten(0, 1), head).log_softmax(-1)
            right = (logprob.argmax(-1) == label[:, 0]).view_as(counts) & counts & known
            label_logprob = logprob.gather(1, label)
            weight = weigh(label_logprob.view_as(counts).masked_fill(~known, float("-inf")), counts) * known
            row_weight = weight.reshape(-1, 1)
            if teacher is None:
                loss = -label_logprob
                difference = logprob.exp_().scatter_add_(1, label, torch.full_like(label_logprob, -1.0))
            else:
                wanted = logits(teacher[part].flatten(0, 1), head).log_softmax(-1)
                probability = wanted.exp()
                loss = (probability * wanted.sub_(logprob)).sum(-1, keepdim=True)
                difference = logprob.exp_().sub_(probability)
            if ctx.needs_input_grad[0]:
                grad[part] = (difference.mul_(row_weight).to(head.dtype) @ head).view_as(grad[part])
            correct = right.cumprod(1).sum(0)
            parts.append(((loss * row_weight).sum(), weight.sum(), correct, counts.sum(0)))
        ctx.save_for_backward(grad)
        sums = tuple(torch.stack(terms).sum(0) for terms in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None, None


def logits(hidden: Tensor, head: Tensor) -> Tensor:
    """fp32 logits [rows, vocab] of hidden [rows, hidden]; rounded to the head's dtype first only on a CPU."""
    if hidden.is_cuda and head.dtype == torch.bfloat16:
        return torch.mm(hidden.to(head.dtype), head.T, out_dtype=torch.float32)
    return F.linear(hidden.to(head.dtype), head).float()

"""Which tokens to draft, given a drafter's logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from redraft.engine.drafters.base import DraftSequence
from redraft.kernels.gumbel import gumbel, noise_key


def choose(
    logits: Tensor, asked: Sequence[tuple[DraftSequence, int]], vocab: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The chosen index, int64 [rows], in each row of logits [rows, tokens], fp32, and its draft_prob [rows].

    ``asked`` are the sequence and the position that each row is for; ``ids`` [tokens] what the target calls the tokens,
    None where they are all of its ``vocab``. Answers that are sampled are drafted under the very noise that the target
    will choose with; filters and penalties are left to the target.
    """
    best, chosen = logits.max(-1)
    sampled = [index for index, (sequence, _) in enumerate(asked) if sequence.sampling.mode == "sampled"]
    for row in sampled:
        sequence, position = asked[row]
        noise = gumbel(noise_key(sequence.seed, sequence.choice, position), vocab, logits.device)
        scores = logits[row] / sequence.sampling.temperature
        chosen[row] = (scores + (noise if ids is None else noise[ids])).argmax()
    if sampled:
        best = logits.gather(-1, chosen[:, None])[:, 0]
    return chosen, (best - logits.logsumexp(-1)).exp()

"""Which blocks a drafter learns from, and what it should have drafted there.

Serving commits an answer's first token at prefill; that token is the first block start, and every later one lies in the
answer too. So a span [start, end) has the block starts start to end - 2: the last leaves one token to draft. What lies
beyond the span's end, another turn included, is no label.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]


def block_starts(spans: Spans) -> Tensor:
    """Every block start [starts, 2] of disjoint spans, each with the end of its span; int64, ascending."""
    starts = [torch.arange(start, max(start, end - 1)) for start, end in spans]
    ends = [torch.full_like(part, end) for part, (_, end) in zip(starts, spans, strict=True)]
    empty = torch.empty(0, dtype=torch.int64)
    return torch.stack((torch.cat([empty, *starts]), torch.cat([empty, *ends])), dim=1)


def choose_blocks(spans: Spans, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of `block_starts` at most, uniformly without repetition, ascending."""
    starts = block_starts(spans)
    if len(starts) <= count:
        return starts
    return starts[torch.randperm(len(starts), generator=generator)[:count].sort().values]


def block_labels(tokens: Tensor, starts: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels and whether they count [starts, block_size - 1] of blocks [starts, 2] in tokens [tokens].

    Slot k's label is the token at the block start's position + k.
    """
    positions = starts[:, :1] + torch.arange(1, block_size)
    valid = positions < starts[:, 1:]
    return tokens[positions.clamp(max=len(tokens) - 1)], valid

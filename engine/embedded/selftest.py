"""Proof at start, on the loaded weights, that a row's arithmetic does not depend on what shares its pass.

Nor on the number of threads, so that these may change while requests run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.engine.embedded.attention import KEY_BLOCK, Segment
from redraft.engine.embedded.cache import pages
from redraft.engine.embedded.model import Target

_LEAD = KEY_BLOCK
"""Rows prefilled before the compared ones, in the same segment, so that these stand in the largest tiles too."""

_SHORT = KEY_BLOCK - 5
_LONG = 9 * KEY_BLOCK + 20
"""Where prefill starts: in both cases the compared rows begin below a padding boundary and end above it."""

_ROWS = 12
_CROWD = 160
_PASSES = (((12,), _CROWD), ((8, 4), 0), ((2, 3, 7), 0), ((1, 5, 6), 0))
"""How many of the compared rows each pass takes, and how many rows of another request share it."""


def rows_are_invariant(target: Target, *, seed: int = 0) -> bool:
    """Whether rows prefilled together, decoded one by one, and verified in blocks have equal bits.

    Rows stand behind two contexts of random K/V, a short and a long one; logits and written K/V are compared. The rows
    decoded one by one take one thread, the others all. A context too short to be tested is not taken for invariant.
    """
    if target.config.context_length < _CROWD:
        return False
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(seed)
    longest = min(_LONG, target.config.context_length - _LEAD - _ROWS)
    shape = target.new_kv(pages(longest + _LEAD + _ROWS) + pages(_CROWD)).shape
    blank = torch.empty(shape).normal_(generator=generator).to(target.dtype).to(target.device)
    tokens = torch.randint(target.config.vocab, (_LEAD + _ROWS + _CROWD,), generator=generator).to(target.device)
    for start in (_SHORT, longest):
        kv = blank.clone()
        hidden = _forward(target, kv, tokens[: _LEAD + _ROWS], [Segment(0, _LEAD + _ROWS, 0, start)])
        position = start + _LEAD
        expected = target.logits(hidden[_LEAD:]), kv[:, position : position + _ROWS].clone()
        torch.set_num_threads(1)
        decoded = _run(target, kv, tokens, position, (1,) * _ROWS, crowd=0)
        torch.set_num_threads(threads)
        verified = (_run(target, kv, tokens, position, widths, crowd=crowd) for widths, crowd in _PASSES)
        for found in (decoded, *verified):
            if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
                return False
    return True


def _run(
    target: Target, kv: Tensor, tokens: Tensor, position: int, widths: Sequence[int], *, crowd: int
) -> tuple[Tensor, Tensor]:
    """Logits and K/V of the compared rows, passed ``widths`` at a time beside ``crowd`` rows of another request."""
    kv = kv.clone()
    kv[:, position : position + _ROWS] = 0
    logits = []
    done = 0
    for width in widths:
        segments = [Segment(0, width, 0, position + done)]
        row_tokens = tokens[_LEAD + done : _LEAD + done + width]
        if crowd:
            segments.append(Segment(width, crowd, kv.shape[1] - pages(crowd), 0))
            row_tokens = torch.cat((row_tokens, tokens[-crowd:]))
        logits.append(target.logits(_forward(target, kv, row_tokens, segments)[:width]))
        done += width
    return torch.cat(logits), kv[:, position : position + done]


def _forward(target: Target, kv: Tensor, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
    positions = [torch.arange(each.position, each.position + each.rows) for each in segments]
    hidden, _ = target.forward(tokens, torch.cat(positions).to(target.device), segments, kv)
    return hidden

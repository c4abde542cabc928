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

_SHORT = KEY_BLOCK - 5
"""Rows begin below a padding boundary and end above it."""

_LONG = 9 * KEY_BLOCK + 20
_ROWS = 12
_CROWD = 160
_PASSES = (((12,), _CROWD), ((8, 4), 0), ((2, 3, 7), 0), ((1, 5, 6), 0))
"""How many rows each pass takes, and how many rows of another request share it."""


def rows_are_invariant(target: Target, *, seed: int = 0) -> bool:
    """Whether rows decoded one by one, verified in blocks and prefilled in a crowd have equal bits.

    Rows stand behind two contexts of random K/V, a short and a long one; logits and written K/V are compared. The rows
    decoded one by one take one thread, the others all.
    """
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(seed)
    longest = min(_LONG, target.config.context_length - _ROWS)
    own_slots = pages(longest + _ROWS)
    shape = target.new_kv(own_slots + pages(_CROWD)).shape
    blank = torch.empty(shape).normal_(generator=generator).to(target.dtype).to(target.device)
    tokens = torch.randint(target.config.vocab, (_ROWS + _CROWD,), generator=generator).to(target.device)
    for position in (_SHORT, longest):
        torch.set_num_threads(1)
        expected = _run(target, blank, tokens, position, (1,) * _ROWS, crowd=0)
        torch.set_num_threads(threads)
        for widths, crowd in _PASSES:
            found = _run(target, blank, tokens, position, widths, crowd=crowd)
            if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
                return False
    return True


def _run(
    target: Target, blank: Tensor, tokens: Tensor, position: int, widths: Sequence[int], *, crowd: int
) -> tuple[Tensor, Tensor]:
    """Logits and K/V of the rows, passed ``widths`` at a time beside ``crowd`` rows of another request."""
    kv = blank.clone()
    logits = []
    done = 0
    for width in widths:
        first = position + done
        segments = [Segment(0, width, 0, first)]
        row_tokens = tokens[done : done + width]
        positions = torch.arange(first, first + width, device=target.device)
        if crowd:
            segments.append(Segment(width, crowd, kv.shape[1] - pages(crowd), 0))
            row_tokens = torch.cat((row_tokens, tokens[_ROWS : _ROWS + crowd]))
            positions = torch.cat((positions, torch.arange(crowd, device=target.device)))
        hidden = target.forward(row_tokens, positions, segments, kv)
        logits.append(target.logits(hidden[:width]))
        done += width
    return torch.cat(logits), kv[:, position : position + done]

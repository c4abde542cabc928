"""Rotary position embedding (Su et al., 2021), with Llama 3's frequency scaling."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import Llama3RopeScaling


class RotaryShape(Protocol):
    """What of a model's configuration decides its rotation."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> Llama3RopeScaling | None: ...


class RotaryEmbedding:
    """Cosines and signed sines for q, k and v heads side by side, so that one multiply-add rotates them together.

    The rotation is ``x * cos + roll(x, head_dim / 2) * sin`` with the first half of ``sin`` negated; value heads get
    cosine 1 and sine 0.
    """

    def __init__(self, config: RotaryShape, device: torch.device) -> None:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        frequency = _scale(1.0 / config.rope_theta**half, config.rope_scaling)
        angle = torch.arange(config.context_length, dtype=torch.float32, device=device)[:, None] * frequency
        self.cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
        self.sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
        self.rotated_heads = config.heads + config.kv_heads
        self.heads = config.heads + 2 * config.kv_heads

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [rows, heads + 2 * kv_heads, head_dim] for positions [rows]."""
        shape = (positions.shape[0], self.heads, self.cos.shape[-1])
        cos = torch.ones(shape, dtype=dtype, device=positions.device)
        sin = torch.zeros(shape, dtype=dtype, device=positions.device)
        cos[:, : self.rotated_heads] = self.cos[positions, None]
        sin[:, : self.rotated_heads] = self.sin[positions, None]
        return cos, sin


def _scale(frequency: Tensor, scaling: Llama3RopeScaling | None) -> Tensor:
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    ratio = scaling.original_context_length / wavelength
    smooth = ((ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency

"""What drafters are built from in training: the engine's arithmetic in the inputs' dtype, with fp32 weights.

Weights are cast where they are used, and parameters named as in checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.engine.drafters.checkpoint import DrafterConfig
from redraft.engine.embedded.linear import product_dtype
from redraft.engine.embedded.rope import RotaryEmbedding

INITIAL_STD = 0.02


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        dtype = product_dtype(x)
        return F.linear(x.to(dtype), self.weight.to(dtype)).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate)
        self.up_proj = Linear(config.hidden, config.intermediate)
        self.down_proj = Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class KeysValues(NamedTuple):
    """Keys and values [sequences, kv_heads, rows, head_dim]."""

    keys: Tensor
    values: Tensor


class Rotation(NamedTuple):
    """Cosines and signed sines [sequences or 1, 1, rows, head_dim]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


def rotation(rope: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """For positions [sequences or 1, rows]; those past the context belong to slots that nothing is learnt from."""
    positions = positions.clamp(max=len(rope.cos) - 1)[:, None]
    return Rotation(rope.cos[positions].to(dtype), rope.sin[positions].to(dtype))


def in_heads(x: Tensor, head_dim: int) -> Tensor:
    """[sequences, heads, rows, head_dim] of x [sequences, rows, heads * head_dim]."""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def attended(query: Tensor, parts: list[KeysValues], mask: Tensor | None) -> Tensor:
    """Output [sequences, rows, heads * head_dim] of query [sequences, heads, rows, head_dim] over all parts' rows.

    mask, bool, is True where a row may see a key; None is causal. One K/V head serves its group of query heads, and is
    repeated for them: masked kernels know no groups.
    """
    keys, values = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    group = query.shape[1] // keys.shape[1]
    keys, values = (each[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for each in (keys, values))
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
    return output.transpose(1, 2).flatten(2)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Give every matrix initial weights that only ``seed`` decides."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)

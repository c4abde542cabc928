"""Hidden states kept slot by slot in layers of the draft K/V's own shape, so that they move along with it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from redraft.engine.drafters.checkpoint import DrafterConfig


def layers_needed(config: DrafterConfig) -> int:
    """How many layers of K/V [2 * kv_heads, head_dim] a hidden state fills."""
    return -(-config.hidden // (2 * config.kv_heads * config.head_dim))


def write(layers: Tensor, hidden: Tensor, slots: Tensor) -> None:
    """Put hidden [rows, hidden] into slots [rows] of layers [layers, slots, 2 * kv_heads, head_dim]."""
    shape = (layers.shape[0], *layers.shape[2:])
    filled = F.pad(hidden, (0, shape[0] * shape[1] * shape[2] - hidden.shape[1]))
    layers.index_copy_(1, slots, filled.view(-1, *shape).transpose(0, 1))


def read(layers: Tensor, slots: Tensor, size: int) -> Tensor:
    """Hidden states [rows, size] of slots [rows]."""
    return layers[:, slots].transpose(0, 1).flatten(1)[:, :size].contiguous()

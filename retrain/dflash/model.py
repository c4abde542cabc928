"""DFlash as it is trained: many blocks of many sequences in one forward, each as if it were drafted alone.

The arithmetic is the serving drafter's (`redraft.engine.drafters.dflash`), in the inputs' dtype; the weights stay fp32
and are cast where they are used. Parameters are named as in the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, load
from redraft.engine.embedded.rope import RotaryEmbedding

INITIAL_STD = 0.02


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


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


class Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, queries)
        self.k_proj = Linear(config.hidden, keys)
        self.v_proj = Linear(config.hidden, keys)
        self.o_proj = Linear(queries, config.hidden)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps)
        self.head_dim = config.head_dim
        self.group = config.heads // config.kv_heads

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeysValues:
        return KeysValues(rotation(self.k_norm(self._heads(self.k_proj(x)))), self._heads(self.v_proj(x)))

    def forward(self, x: Tensor, rotation: Rotation, context: KeysValues, mask: Tensor) -> Tensor:
        query = rotation(self.q_norm(self._heads(self.q_proj(x))))
        block = self.keys_values(x, rotation)
        keys = torch.cat((context.keys, block.keys), dim=2)
        values = torch.cat((context.values, block.values), dim=2)
        attended = F.scaled_dot_product_attention(query, self._repeated(keys), self._repeated(values), attn_mask=mask)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """[sequences, heads, rows, head_dim] of x [sequences, rows, heads * head_dim]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        """One K/V head a query head: masked kernels know no groups."""
        return x[:, :, None].expand(-1, -1, self.group, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate)
        self.up_proj = Linear(config.hidden, config.intermediate)
        self.down_proj = Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation, context: KeysValues, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, mask)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class DFlashModel(nn.Module):
    """A drafter of fp32 weights, drawn from ``seed``."""

    def __init__(self, config: DFlashConfig, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.feature_layers) * config.hidden, config.hidden)
        self.hidden_norm = RMSNorm(config.hidden, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
        self.to(device)
        self._rope = RotaryEmbedding(config, device)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> DFlashModel:
        """The drafter of a checkpoint folder; raises `DrafterError`."""
        config, tensors = load(folder)
        model = cls(config, device)
        model.load_state_dict(tensors)
        return model

    def forward(
        self, features: Tensor, starts: Tensor, tokens: Tensor, embedding: Tensor, window: int | None = None
    ) -> Tensor:
        """Hidden states [sequences, blocks, block_size - 1, hidden] from which the head drafts.

        features [sequences, positions, layers * hidden] from position 0, padded with anything; starts and tokens
        [sequences, blocks] int64: block starts and the tokens there; embedding [vocab, hidden]: the target's. A block
        sees the features before its start, of the last ``window`` positions at most, and itself: no later feature, no
        other block, no padding. A dead block starts at 0, so that it sees no feature at all.
        """
        return self.draft(self.inject(features), starts, tokens, embedding, window)

    def inject(self, features: Tensor) -> list[KeysValues]:
        """Each layer's K/V of features [sequences, positions, layers * hidden]."""
        context = self.hidden_norm(self.fc(features))
        rotation = self._rotation(torch.arange(features.shape[1], device=features.device)[None], features.dtype)
        return [layer.self_attn.keys_values(context, rotation) for layer in self._layers()]

    def draft(
        self,
        context: list[KeysValues],
        starts: Tensor,
        tokens: Tensor,
        embedding: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """Like `forward`, from the K/V that `inject` made."""
        size = self.config.block_size
        sequences, blocks = starts.shape
        x = embedding[self.config.mask_token_id].expand(sequences, blocks, size - 1, -1)
        x = torch.cat((embedding[tokens][:, :, None], x), dim=2).flatten(1, 2)
        positions = starts[:, :, None] + torch.arange(size, device=starts.device)
        rotation = self._rotation(positions.flatten(1), x.dtype)
        mask = block_mask(starts, size, context[0].keys.shape[2], window)
        for layer, keys_values in zip(self._layers(), context, strict=True):
            x = layer(x, rotation, keys_values, mask)
        output: Tensor = self.norm(x.view(sequences, blocks, size, -1)[:, :, 1:])
        return output

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """For positions [sequences or 1, rows]; those past the context belong to slots that nothing is learnt from."""
        positions = positions.clamp(max=self.config.context_length - 1)[:, None]
        return Rotation(self._rope.cos[positions].to(dtype), self._rope.sin[positions].to(dtype))


def block_mask(starts: Tensor, block_size: int, positions: int, window: int | None = None) -> Tensor:
    """What rows may see: bool [sequences, 1, blocks * block_size, positions + blocks * block_size], True is visible.

    A block's rows see the context strictly before their block start (within ``window`` of it) and their own block, in
    both directions. No row sees nothing, which softmax could not bear.
    """
    sequences, blocks = starts.shape
    context = torch.arange(positions, device=starts.device)
    visible = context < starts[:, :, None]
    if window is not None:
        visible &= context >= starts[:, :, None] - window
    block = torch.arange(blocks, device=starts.device).repeat_interleave(block_size)
    own = (block[:, None] == block).expand(sequences, -1, -1)
    return torch.cat((visible.repeat_interleave(block_size, dim=1), own), dim=2)[:, None]

"""The target: a Llama- or Qwen3-shaped decoder over a K/V arena, one ragged pass at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig, open_tensors
from redraft.engine.embedded.attention import Segment, arena_slots, attend, plan_attention
from redraft.engine.embedded.cache import new_kv
from redraft.engine.embedded.linear import Linear, make_linear
from redraft.engine.embedded.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Target:
    """Weights and forward pass; rows are independent of each other's presence if ``invariant``."""

    def __init__(
        self, folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, invariant: bool
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.invariant = invariant
        tensors = _load(folder, device, dtype)

        def linear(*names: str) -> Linear:
            return make_linear(torch.cat([tensors.pop(f"{name}.weight") for name in names]), invariant=invariant)

        self.embedding = tensors["model.embed_tokens.weight"]
        self.head_weight = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self.head = make_linear(self.head_weight, invariant=invariant)
        self.norm = tensors["model.norm.weight"]
        self.layers = []
        for index in range(config.layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            self.layers.append(
                Layer(
                    input_norm=tensors[f"{prefix}.input_layernorm.weight"],
                    qkv=linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                    q_norm=tensors.get(f"{attention}.q_norm.weight"),
                    k_norm=tensors.get(f"{attention}.k_norm.weight"),
                    output=linear(f"{attention}.o_proj"),
                    post_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
                    gate=linear(f"{mlp}.gate_proj"),
                    up=linear(f"{mlp}.up_proj"),
                    down=linear(f"{mlp}.down_proj"),
                )
            )
        self.rope = RotaryEmbedding(config, device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        kv: Tensor,
        feature_layers: Collection[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run one pass and write its K/V.

        tokens and positions [rows] int64; kv [layers, slots, 2 * kv_heads, head_dim], whose slots from a segment's
        ``slot`` up to its ``position`` already hold that request's earlier K/V. Returns the final hidden states
        [rows, hidden] before the last norm, and the features [rows, len(feature_layers) * hidden]: what leaves those
        layers (0-based, ascending), side by side.
        """
        config = self.config
        slots = arena_slots(positions, segments)
        tiles = plan_attention(
            segments,
            config.heads // config.kv_heads,
            invariant=self.invariant,
            dtype=self.dtype,
            device=self.device,
        )
        heads = config.heads + 2 * config.kv_heads
        cos, sin = self.rope.tables(positions, self.dtype)
        x = self.embedding[tokens]
        features = [x.new_empty(x.shape[0], 0)]
        for index, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm)).view(-1, heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
                qkv = torch.cat((self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm), v), dim=1)
            qkv = torch.addcmul(qkv * cos, qkv.roll(config.head_dim // 2, -1), sin)
            layer_kv.index_copy_(0, slots, qkv[:, config.heads :])
            attended = attend(qkv[:, : config.heads], layer_kv, tiles)
            x = layer.output.add(attended, x)
            normed = self._rms_norm(x, layer.post_norm)
            x = layer.down.add(layer.up.mul(normed, layer.gate.silu(normed)), x)
            if index in feature_layers:
                features.append(x)
        return x, torch.cat(features, dim=-1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of hidden states [rows, hidden] from `forward`."""
        return self.head(self._rms_norm(hidden, self.norm))

    def new_kv(self, slots: int) -> Tensor:
        """K/V storage [layers, slots, 2 * kv_heads, head_dim], zero, backed by memory only where written."""
        config = self.config
        return new_kv(config.layers, slots, 2 * config.kv_heads, config.head_dim, self.dtype, self.device)

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return config.layers * 2 * config.kv_heads * config.head_dim * self.dtype.itemsize

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)


def _load(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    files: dict[Path, list[str]] = {}
    for name, entry in open_tensors(folder).items():
        files.setdefault(entry.file, []).append(name)
    for file, names in files.items():
        with safe_open(file, framework="pt", device=str(device)) as handle:
            for name in names:
                tensors[name] = handle.get_tensor(name).to(dtype)
    return tensors

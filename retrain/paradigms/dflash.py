"""DFlash as it is trained: many blocks of many sequences in one forward, each as if it were drafted alone.

The arithmetic is the serving drafter's (`redraft.engine.drafters.dflash`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, check_fits, load, save
from redraft.engine.embedded.rope import RotaryEmbedding
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import TrainingError
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.modules import (
    MLP,
    KeysValues,
    Linear,
    RMSNorm,
    Rotation,
    attended,
    draw_weights,
    in_heads,
    rotation,
)
from redraft.retrain.paradigms.base import BLOCKS_PER_PASS, DraftModel


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

    def keys_values(self, x: Tensor, rotate: Rotation) -> KeysValues:
        keys = rotate(self.k_norm(in_heads(self.k_proj(x), self.head_dim)))
        return KeysValues(keys, in_heads(self.v_proj(x), self.head_dim))

    def forward(
        self, x: Tensor, rotate: Rotation, before: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        query = rotate(self.q_norm(in_heads(self.q_proj(x), self.head_dim)))
        own = self.keys_values(x, rotate)
        return self.o_proj(attended(query, [*before, own], mask)), own


class Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotate: Rotation, before: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        output, own = self.self_attn(self.input_layernorm(x), rotate, before, mask)
        x = x + output
        return x + self.mlp(self.post_attention_layernorm(x)), own


class DFlashModel(DraftModel):
    """A drafter of fp32 weights, drawn from ``seed``."""

    title = "DFlash drafter"
    card = (
        "A DFlash drafter: one forward fills a block of draft tokens, attending to the target's features. It only "
        "proposes: what is served is the target's own. It belongs to the one target named below."
    )

    def __init__(self, config: DFlashConfig, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config: DFlashConfig = config
        self.fc = Linear(len(config.feature_layers) * config.hidden, config.hidden)
        self.hidden_norm = RMSNorm(config.hidden, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        draw_weights(self, seed)
        self.to(device)
        self._rope = RotaryEmbedding(config, device)

    @classmethod
    def create(cls, target: FrozenTarget, config: TrainConfig, samples: Sequence[Sample]) -> Self:
        shape = DFlashConfig.for_target(
            target.target.config,
            target.identity,
            layers=config.layers,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        shape = replace(shape, injection=config.injection, autoregressive=config.autoregressive)
        if len(set(shape.feature_layers)) < config.layers:
            raise TrainingError(
                f"layers: {config.layers} are too many for a target of {target.target.config.layers} layers"
            )
        return cls(shape, target.target.device, config.seed)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        config, tensors = load(folder)
        model = cls(config, device)
        model.load_state_dict(tensors)
        return model

    def save(self, folder: Path, card: str) -> None:
        save(folder, self.config, self.state_dict(), card)

    def check_fits(self, target: FrozenTarget, where: Path) -> None:
        check_fits(self.config, target.target.config, target.identity, where)

    def recipe(self, config: TrainConfig) -> TrainConfig:
        shape = self.config
        names = ("block_size", "layers", "mask_token_id", "injection", "autoregressive")
        return config.model_copy(update={name: getattr(shape, name) for name in names})

    def taught(self, features: Tensor, ids: Tensor, starts: Tensor, embedding: Tensor, window: int | None) -> Tensor:
        if not self.config.autoregressive:
            hidden: Tensor = self(features, starts, ids.gather(1, starts), embedding, window)
            return hidden
        at = starts[:, :, None] + torch.arange(self.config.block_size - 1, device=starts.device)
        tokens = ids.gather(1, at.flatten(1)).view_as(at)
        return self._rows(self.inject(features), starts, tokens, embedding, window)

    @torch.inference_mode()
    def proposals(self, features: Tensor, ids: Tensor, starts: Tensor, target: FrozenTarget) -> list[list[int]]:
        context = self.inject(features[None])
        drafted: list[list[int]] = []
        for at in torch.split(starts[None], BLOCKS_PER_PASS, dim=1):
            tokens = ids[at]
            if not self.config.autoregressive:
                hidden = self.draft(context, at, tokens, target.embedding)[0]
                drafted += target.target.head(hidden.flatten(0, 1)).argmax(-1).view(hidden.shape[:2]).tolist()
                continue
            tokens = tokens[:, :, None]
            for _ in range(self.config.block_size - 1):
                hidden = self._rows(context, at, tokens, target.embedding)[:, :, -1]
                chosen = target.target.head(hidden[0]).argmax(-1)
                tokens = torch.cat((tokens, chosen[None, :, None]), dim=2)
            drafted += tokens[0, :, 1:].tolist()
        return drafted

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
        x = self.hidden_norm(self.fc(features))
        rotate = self._rotation(torch.arange(features.shape[1], device=features.device)[None], features.dtype)
        if self.config.injection:
            return [layer.self_attn.keys_values(x, rotate) for layer in self._layers()]
        context = []
        for layer in self._layers():
            x, own = layer(x, rotate, [], None)
            context.append(own)
        return context

    def draft(
        self,
        context: list[KeysValues],
        starts: Tensor,
        tokens: Tensor,
        embedding: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """Like `forward`, from the K/V that `inject` made."""
        unknown = tokens.new_full((*starts.shape, self.config.block_size - 1), self.config.mask_token_id)
        filled = torch.cat((tokens[:, :, None], unknown), dim=2)
        return self._rows(context, starts, filled, embedding, window)[:, :, 1:]

    def _rows(
        self,
        context: list[KeysValues],
        starts: Tensor,
        tokens: Tensor,
        embedding: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """Hidden states [sequences, blocks, rows, hidden] of blocks of ``tokens`` [sequences, blocks, rows]."""
        sequences, blocks, rows = tokens.shape
        x = embedding[tokens].flatten(1, 2)
        positions = starts[:, :, None] + torch.arange(rows, device=starts.device)
        rotate = self._rotation(positions.flatten(1), x.dtype)
        causal = self.config.autoregressive
        mask = block_mask(starts, rows, context[0].keys.shape[2], window, causal=causal)
        for layer, keys_values in zip(self._layers(), context, strict=True):
            x, _ = layer(x, rotate, [keys_values], mask)
        output: Tensor = self.norm(x.view(sequences, blocks, rows, -1))
        return output

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return rotation(self._rope, positions, dtype)


def block_mask(
    starts: Tensor, block_size: int, positions: int, window: int | None = None, *, causal: bool = False
) -> Tensor:
    """What rows may see: bool [sequences, 1, blocks * block_size, positions + blocks * block_size], True is visible.

    A block's rows see the context strictly before their block start (within ``window`` of it) and their own block, in
    both directions, or up to themselves if ``causal``. No row sees nothing, which softmax could not bear.
    """
    sequences, blocks = starts.shape
    context = torch.arange(positions, device=starts.device)
    visible = context < starts[:, :, None]
    if window is not None:
        visible &= context >= starts[:, :, None] - window
    block = torch.arange(blocks, device=starts.device).repeat_interleave(block_size)
    own = block[:, None] == block
    own = (own.tril() if causal else own).expand(sequences, -1, -1)
    return torch.cat((visible.repeat_interleave(block_size, dim=1), own), dim=2)[:, None]

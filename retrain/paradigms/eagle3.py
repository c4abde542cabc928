"""EAGLE-3 as it is trained: drafting steps on the true answer's tokens and the drafter's own hidden states.

The arithmetic is the serving drafter's (`redraft.engine.drafters.eagle3`). Step 0 is one causal pass over all rows,
each of a token and the target's features before it. In later steps the blocks' rows go on, each seeing the features'
rows up to its block start and its own block's earlier steps. That is the training-time test of Li et al.
(arXiv 2503.01840), at drawn block starts instead of at every position, so that memory does not grow with length times
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.engine.drafters.base import LEAST_SURVIVAL
from redraft.engine.drafters.eagle3_checkpoint import (
    HEAD,
    Eagle3Config,
    check_fits,
    load,
    save,
    target_ids,
    vocabulary,
)
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
    def __init__(self, config: Eagle3Config, inputs: int) -> None:
        super().__init__()
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(inputs, queries)
        self.k_proj = Linear(inputs, keys)
        self.v_proj = Linear(inputs, keys)
        self.o_proj = Linear(queries, config.hidden)
        self.head_dim = config.head_dim

    def forward(
        self, x: Tensor, rotate: Rotation, before: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        query, keys, values = (
            in_heads(project(x), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        own = KeysValues(rotate(keys), values)
        return self.o_proj(attended(rotate(query), [*before, own], mask)), own


class Layer(nn.Module):
    """The first takes the embedded token beside the hidden state, and has a norm for it."""

    def __init__(self, config: Eagle3Config, *, first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps) if first else None
        self.hidden_norm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config, 2 * config.hidden if first else config.hidden)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, embedded: Tensor, rotate: Rotation, before: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        inputs = self.hidden_norm(x)
        if self.input_layernorm is not None:
            inputs = torch.cat((self.input_layernorm(embedded), inputs), dim=-1)
        output, own = self.self_attn(inputs, rotate, before, mask)
        x = x + output
        return x + self.mlp(self.post_attention_layernorm(x)), own


class Eagle3Model(DraftModel):
    """A drafter of fp32 weights, drawn from ``seed``; ``words`` are the target's ids of all that it can draft."""

    title = "EAGLE-3 drafter"
    card = (
        "An EAGLE-3 drafter: a small decoder that goes on from the target's features, a token at a time. It only "
        "proposes: what is served is the target's own. It belongs to the one target named below."
    )

    d2t: Tensor
    t2d: Tensor
    _rows: Tensor

    def __init__(self, config: Eagle3Config, words: Tensor, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config: Eagle3Config = config
        self.fc = Linear(len(config.feature_layers) * config.hidden, config.hidden)
        self.midlayer = Layer(config, first=True)
        self.layers = nn.ModuleDict({str(index): Layer(config, first=False) for index in range(1, config.layers)})
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        draw_weights(self, seed)
        for name, tensor in vocabulary(words, config.vocab).items():
            self.register_buffer(name, tensor)
        rows = torch.full((config.vocab,), -1)
        rows[words] = torch.arange(len(words))
        self.register_buffer("_rows", rows, persistent=False)
        self.to(device)
        self._rope = RotaryEmbedding(config, device)

    @classmethod
    def create(cls, target: FrozenTarget, config: TrainConfig, samples: Sequence[Sample]) -> Self:
        shape = Eagle3Config.for_target(
            target.target.config,
            target.identity,
            layers=config.layers,
            block_size=config.block_size,
            draft_vocab=config.draft_vocab,
        )
        if len(set(shape.feature_layers)) < len(shape.feature_layers) or min(shape.feature_layers) < 0:
            raise TrainingError(f"a target of {target.target.config.layers} layers has too few to read features from")
        return cls(shape, frequent(samples, shape.draft_vocab, shape.vocab), target.target.device, config.seed)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        config, tensors = load(folder)
        tensors.pop(HEAD, None)
        model = cls(config, target_ids(tensors["d2t"]), device)
        model.load_state_dict(tensors)
        return model

    def save(self, folder: Path, card: str) -> None:
        save(folder, self.config, self.state_dict(), card)

    def check_fits(self, target: FrozenTarget, where: Path) -> None:
        check_fits(self.config, target.target.config, target.identity, where)

    def recipe(self, config: TrainConfig) -> TrainConfig:
        shape = self.config
        own = {"block_size": shape.block_size, "layers": shape.layers, "draft_vocab": shape.draft_vocab}
        return config.model_copy(update=own)

    def head(self, head: Tensor) -> Tensor:
        return head[target_ids(self.d2t)]

    def labels(self, ids: Tensor) -> Tensor:
        return self._rows[ids]

    def taught(self, features: Tensor, ids: Tensor, starts: Tensor, embedding: Tensor, window: int | None) -> Tensor:
        hidden, context = self._read(features, ids, starts, embedding, window)
        visible = self._visible(features.shape[1], starts, window)
        taught = [hidden]
        steps: list[list[KeysValues]] = []
        for step in range(1, self.config.block_size - 1):
            embedded = embedding[ids.gather(1, starts + step)]
            hidden = self._step(hidden, embedded, starts, context, steps, visible)
            taught.append(hidden)
        output: Tensor = self.norm(torch.stack(taught, dim=2))
        return output

    @torch.inference_mode()
    def proposals(self, features: Tensor, ids: Tensor, starts: Tensor, target: FrozenTarget) -> list[list[int]]:
        head, words = self.head(target.head), target_ids(self.d2t)
        drafted: list[list[int]] = []
        first, context = self._read(features[None], ids[None], starts[None], target.embedding, None)
        parts = zip(torch.split(starts[None], BLOCKS_PER_PASS, 1), torch.split(first, BLOCKS_PER_PASS, 1), strict=True)
        for at, hidden in parts:
            visible = self._visible(len(features), at, None)
            steps: list[list[KeysValues]] = []
            tokens: list[Tensor] = []
            chances: list[Tensor] = []
            for step in range(self.config.block_size - 1):
                if step:
                    hidden = self._step(hidden, target.embedding[tokens[-1]][None], at, context, steps, visible)
                logits = F.linear(self.norm(hidden)[0].to(head.dtype), head).to(hidden.dtype).float()
                best, chosen = logits.max(-1)
                tokens.append(words[chosen])
                chances.append((best - logits.logsumexp(-1)).exp())
            survival = torch.stack(chances, dim=1).cumprod(1)
            lengths = (survival[:, :-1] >= LEAST_SURVIVAL).sum(1) + 1
            drafted += [
                row[:length] for row, length in zip(torch.stack(tokens, dim=1).tolist(), lengths.tolist(), strict=True)
            ]
        return drafted

    def _read(
        self, features: Tensor, ids: Tensor, starts: Tensor, embedding: Tensor, window: int | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """Step 0: hidden states [sequences, blocks, hidden] of the rows before block starts, and K/V of all rows."""
        positions = torch.arange(features.shape[1], device=features.device)
        after = ids[:, 1 : len(positions) + 1]
        after = F.pad(after, (0, len(positions) - after.shape[1]))
        mask = None if window is None else self._band(positions, window)
        rotate = rotation(self._rope, positions[None], features.dtype)
        x, embedded = self.fc(features), embedding[after]
        context = []
        for layer in self._all_layers():
            x, own = layer(x, embedded, rotate, [], mask)
            context.append(own)
        rows = (starts - 1).clamp(min=0)
        return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2])), context

    def _step(
        self,
        hidden: Tensor,
        embedded: Tensor,
        starts: Tensor,
        context: list[KeysValues],
        steps: list[list[KeysValues]],
        visible: Tensor,
    ) -> Tensor:
        """The next hidden states of all blocks; their K/V is appended to ``steps``."""
        blocks = starts.shape[1]
        step = len(steps) + 1
        own = torch.eye(blocks, dtype=torch.bool, device=starts.device).repeat(1, step).expand(len(starts), -1, -1)
        mask = torch.cat((visible, own), dim=2)[:, None]
        rotate = rotation(self._rope, starts - 1 + step, hidden.dtype)
        made = []
        for index, layer in enumerate(self._all_layers()):
            before = [context[index], *(earlier[index] for earlier in steps)]
            hidden, keys_values = layer(hidden, embedded, rotate, before, mask)
            made.append(keys_values)
        steps.append(made)
        return hidden

    def _visible(self, positions: int, starts: Tensor, window: int | None) -> Tensor:
        """Which features' rows a block sees: bool [sequences, blocks, positions]."""
        at = torch.arange(positions, device=starts.device)
        visible = at < starts[:, :, None]
        return visible if window is None else visible & (at >= starts[:, :, None] - window)

    def _band(self, positions: Tensor, window: int) -> Tensor:
        back = positions[:, None] - positions
        return ((back >= 0) & (back < window))[None, None]

    def _all_layers(self) -> list[Layer]:
        return [self.midlayer, *(layer for layer in self.layers.values() if isinstance(layer, Layer))]


def frequent(samples: Sequence[Sample], count: int, vocab: int) -> Tensor:
    """The ``count`` tokens that answers have most often, int64, ascending; unused ones fill up, lowest ids first."""
    seen: Counter[int] = Counter()
    for sample in samples:
        for start, end in sample.spans:
            seen.update(sample.token_ids[start:end])
    order = sorted(range(vocab), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))

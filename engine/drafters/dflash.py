"""DFlash: one forward fills a block of mask tokens, attending to the target's features injected as K/V.

Every target row's features are projected once, when they exist, and kept as draft K/V only. A block of B rows is the
last committed token (whose features do not exist yet) and B-1 mask tokens; its rows see all draft K/V before the block
start and each other, and row k proposes the token at the block start's position + k. Blocks are whole however few of
their tokens are wanted, as they were in training; only at the end of a sequence's room or context are they shorter.

Source: z-lab's DFlash (github.com/z-lab/dflash, ``dflash/model.py``), in SGLang's ``DFlashDraftModel`` format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.drafters.base import DraftSequence, Proposal
from redraft.engine.drafters.dflash_checkpoint import check_fits, load
from redraft.engine.embedded.attention import Segment, attend, plan_block_attention
from redraft.engine.embedded.cache import new_kv
from redraft.engine.embedded.linear import Linear, make_linear
from redraft.engine.embedded.model import Target
from redraft.engine.embedded.rope import RotaryEmbedding
from redraft.engine.types import DrafterVersion
from redraft.kernels.gumbel import gumbel, noise_key


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    output: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class DFlashDrafter:
    """A loaded checkpoint beside the target whose embedding and head it shares.

    Raises `DrafterError` if the checkpoint is damaged or belongs to another target.
    """

    @torch.no_grad()
    def __init__(
        self,
        folder: Path,
        version: DrafterVersion,
        target: Target,
        identity: str,
        slots: int,
        context_length: int | None = None,
    ) -> None:
        config, tensors = load(folder)
        check_fits(config, target.config, identity, folder, context_length)
        self.version = version
        self.feature_layers = config.feature_layers
        self.block_size = config.block_size
        self._config = config
        self._target = target
        self._rope = RotaryEmbedding(config, target.device)
        weights = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}

        def linear(*names: str) -> Linear:
            return make_linear(torch.cat([weights[f"{name}.weight"] for name in names]), invariant=False)

        layers = [f"layers.{index}" for index in range(config.layers)]
        self._project = linear("fc")
        self._hidden_norm = weights["hidden_norm.weight"]
        self._norm = weights["norm.weight"]
        self._inject = linear(*[f"{layer}.self_attn.{name}_proj" for layer in layers for name in ("k", "v")])
        self._k_norms = torch.stack([weights[f"{layer}.self_attn.k_norm.weight"] for layer in layers])[:, None]
        self._layers = [
            Layer(
                input_norm=weights[f"{layer}.input_layernorm.weight"],
                qkv=linear(*[f"{layer}.self_attn.{name}_proj" for name in ("q", "k", "v")]),
                q_norm=weights[f"{layer}.self_attn.q_norm.weight"],
                k_norm=weights[f"{layer}.self_attn.k_norm.weight"],
                output=linear(f"{layer}.self_attn.o_proj"),
                post_norm=weights[f"{layer}.post_attention_layernorm.weight"],
                gate=linear(f"{layer}.mlp.gate_proj"),
                up=linear(f"{layer}.mlp.up_proj"),
                down=linear(f"{layer}.mlp.down_proj"),
            )
            for layer in layers
        ]
        self.kv: Tensor | None = self.new_kv(slots)

    def new_kv(self, slots: int) -> Tensor:
        config, target = self._config, self._target
        return new_kv(config.layers, slots, 2 * config.kv_heads, config.head_dim, target.dtype, target.device)

    @torch.inference_mode()
    def materialise(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        config = self._config
        context = self._rms_norm(self._project(features), self._hidden_norm)
        shape = (context.shape[0], config.layers, 2, config.kv_heads, config.head_dim)
        k, v = self._inject(context).view(shape).unbind(2)
        cos, sin = (table[:, None, config.heads : -config.kv_heads] for table in self._rope_tables(positions))
        k = F.rms_norm(k, (config.head_dim,), None, config.rms_eps) * self._k_norms
        k = torch.addcmul(k * cos, k.roll(config.head_dim // 2, -1), sin)
        assert self.kv is not None
        self.kv.index_copy_(1, slots, torch.cat((k, v), dim=2).transpose(0, 1))

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        drafting = [sequence for sequence in sequences if sequence.length > 0]
        proposals = iter(self._draft(drafting) if drafting else ())
        return [next(proposals) if sequence.length > 0 else Proposal() for sequence in sequences]

    @torch.inference_mode()
    def _draft(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        device, mask_token = self._target.device, self._config.mask_token_id
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments: list[Segment] = []
        lengths: list[int] = []
        drafted: list[int] = []
        for sequence in sequences:
            start = len(sequence.tokens) - 1
            rows = min(self.block_size, sequence.room, self._config.context_length - start)
            segments.append(Segment(len(tokens), rows, sequence.slot, start))
            lengths.append(min(sequence.length, rows - 1))
            drafted.extend(range(len(tokens) + 1, len(tokens) + 1 + lengths[-1]))
            tokens += [sequence.tokens[-1], *[mask_token] * (rows - 1)]
            positions += range(start, start + rows)
            slots += range(sequence.slot + start, sequence.slot + start + rows)
        hidden = self._forward(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            segments,
            [sequence.window_start for sequence in sequences],
        )
        logits = self._target.head(self._rms_norm(hidden[torch.tensor(drafted, device=device)], self._norm)).float()
        best, chosen = logits.max(-1)
        sampled = [sequence.sampling.mode == "sampled" for sequence in sequences]
        if any(sampled):
            chosen = self._coupled(sequences, lengths, logits, chosen)
            best = logits.gather(-1, chosen[:, None])[:, 0]
        probabilities = (best - logits.logsumexp(-1)).exp()
        proposals, ids, probs = [], chosen.tolist(), probabilities.tolist()
        first = 0
        for length in lengths:
            end = first + length
            proposals.append(Proposal(tuple(ids[first:end]), draft_prob=tuple(probs[first:end])))
            first = end
        return proposals

    def _coupled(
        self, sequences: Sequence[DraftSequence], lengths: Sequence[int], logits: Tensor, greedy: Tensor
    ) -> Tensor:
        """Tokens under the noise that the target will choose with; filters and penalties are left to the target."""
        chosen = greedy.clone()
        row = 0
        for sequence, length in zip(sequences, lengths, strict=True):
            for position in range(len(sequence.tokens), len(sequence.tokens) + length):
                if sequence.sampling.mode == "sampled":
                    key = noise_key(sequence.seed, sequence.choice, position)
                    noise = gumbel(key, logits.shape[-1], logits.device)
                    chosen[row] = (logits[row] / sequence.sampling.temperature + noise).argmax()
                row += 1
        return chosen

    def _forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, segments: Sequence[Segment], windows: Sequence[int]
    ) -> Tensor:
        """Hidden states [rows, hidden] of whole blocks; the blocks' own K/V is scratch, overwritten once committed."""
        config = self._config
        heads = config.heads + 2 * config.kv_heads
        tiles = plan_block_attention(segments, windows)
        cos, sin = self._rope_tables(positions)
        x = self._target.embedding[tokens]
        assert self.kv is not None
        for layer, layer_kv in zip(self._layers, self.kv, strict=True):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm)).view(-1, heads, config.head_dim)
            q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            qkv = torch.cat((self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm), v), dim=1)
            qkv = torch.addcmul(qkv * cos, qkv.roll(config.head_dim // 2, -1), sin)
            layer_kv.index_copy_(0, slots, qkv[:, config.heads :])
            x = layer.output.add(attend(qkv[:, : config.heads], layer_kv, tiles), x)
            normed = self._rms_norm(x, layer.post_norm)
            x = layer.down.add(layer.up.mul(normed, layer.gate.silu(normed)), x)
        return x

    def _rope_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope.tables(positions, self._target.dtype)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_eps)

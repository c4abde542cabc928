"""DFlash: one forward fills a block of mask tokens, attending to the target's features injected as K/V.

Every target row's features are projected once, when they exist, and kept as draft K/V only. A block of B rows is the
last committed token (whose features do not exist yet) and B-1 mask tokens; its rows see all draft K/V before the block
start and each other, and row k proposes the token at the block start's position + k. Blocks are whole however few of
their tokens are wanted, as they were in training; only at the end of a sequence's room or context are they shorter.

Two configurations exist to show what each half is worth. Without injection, features are rows of input like any other,
which the layers' own K/V is made of (diffusion only). Autoregressive, a block's rows are drafted one after another,
each of the token before it (injection only).

Source: z-lab's DFlash (github.com/z-lab/dflash, ``dflash/model.py``), in SGLang's ``DFlashDraftModel`` format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.drafters.base import DraftSequence, Proposal, TargetRows
from redraft.engine.drafters.choosing import choose
from redraft.engine.drafters.dflash_checkpoint import check_fits, load
from redraft.engine.embedded.attention import Segment, Tile, attend, plan_attention, plan_block_attention
from redraft.engine.embedded.cache import new_kv
from redraft.engine.embedded.linear import Linear, make_linear
from redraft.engine.embedded.model import Target
from redraft.engine.embedded.rope import RotaryEmbedding
from redraft.engine.types import DrafterVersion


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
    def materialise(self, rows: TargetRows) -> None:
        context = self._rms_norm(self._project(rows.features), self._hidden_norm)
        if self._config.injection:
            self._write_injected(context, rows)
        else:
            self._forward(context, rows.positions, rows.slots, self._context_tiles(rows), all_layers=False)

    def _write_injected(self, context: Tensor, rows: TargetRows) -> None:
        """K/V of every layer from the same context [rows, hidden]."""
        config = self._config
        shape = (context.shape[0], config.layers, 2, config.kv_heads, config.head_dim)
        k, v = self._inject(context).view(shape).unbind(2)
        cos, sin = (table[:, None, config.heads : -config.kv_heads] for table in self._rope_tables(rows.positions))
        k = F.rms_norm(k, (config.head_dim,), None, config.rms_eps) * self._k_norms
        k = torch.addcmul(k * cos, k.roll(config.head_dim // 2, -1), sin)
        assert self.kv is not None
        self.kv.index_copy_(1, rows.slots, torch.cat((k, v), dim=2).transpose(0, 1))

    def _context_tiles(self, rows: TargetRows) -> list[Tile]:
        """Rows of context see those before them, from their window on."""
        segments = [
            Segment(segment.row, segment.rows, segment.slot + window, segment.position - window)
            for segment, window in zip(rows.segments, rows.windows, strict=True)
        ]
        config, target = self._config, self._target
        group = config.heads // config.kv_heads
        return plan_attention(segments, group, invariant=False, dtype=target.dtype, device=target.device)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        rows = [self._rows(sequence) for sequence in sequences]
        drafting = [(sequence, count) for sequence, count in zip(sequences, rows, strict=True) if count > 1]
        draft = self._draft_in_turn if self._config.autoregressive else self._draft_at_once
        proposals = iter(draft(drafting) if drafting else ())
        return [next(proposals) if count > 1 else Proposal() for count in rows]

    def _rows(self, sequence: DraftSequence) -> int:
        """Rows of a sequence's block; drafted one after another, no more than are wanted."""
        start = len(sequence.tokens) - 1
        most = sequence.length + 1 if self._config.autoregressive else self.block_size
        rows = min(self.block_size, most, sequence.room, self._config.context_length - start)
        return rows if sequence.length > 0 else 0

    @torch.inference_mode()
    def _draft_at_once(self, drafting: Sequence[tuple[DraftSequence, int]]) -> list[Proposal]:
        mask_token = self._config.mask_token_id
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments: list[Segment] = []
        lengths: list[int] = []
        drafted: list[int] = []
        for sequence, rows in drafting:
            start = len(sequence.tokens) - 1
            segments.append(Segment(len(tokens), rows, sequence.slot, start))
            lengths.append(min(sequence.length, rows - 1))
            drafted.extend(range(len(tokens) + 1, len(tokens) + 1 + lengths[-1]))
            tokens += [sequence.tokens[-1], *[mask_token] * (rows - 1)]
            positions += range(start, start + rows)
            slots += range(sequence.slot + start, sequence.slot + start + rows)
        sequences = [sequence for sequence, _ in drafting]
        hidden = self._blocks(tokens, positions, slots, segments, sequences)
        asked = [
            (sequence, len(sequence.tokens) + slot)
            for sequence, length in zip(sequences, lengths, strict=True)
            for slot in range(length)
        ]
        chosen, draft_probs = self._choose(hidden[torch.tensor(drafted, device=hidden.device)], asked)
        ids, probs = iter(chosen.tolist()), iter(draft_probs.tolist())
        return [Proposal(tuple(islice(ids, length)), draft_prob=tuple(islice(probs, length))) for length in lengths]

    @torch.inference_mode()
    def _draft_in_turn(self, drafting: Sequence[tuple[DraftSequence, int]]) -> list[Proposal]:
        drafted: list[list[int]] = [[] for _ in drafting]
        draft_prob: list[list[float]] = [[] for _ in drafting]
        last = [sequence.tokens[-1] for sequence, _ in drafting]
        for step in range(self.block_size - 1):
            active = [index for index, (_, rows) in enumerate(drafting) if step < rows - 1]
            if not active:
                break
            sequences = [drafting[index][0] for index in active]
            positions = [len(sequence.tokens) - 1 + step for sequence in sequences]
            slots = [sequence.slot + position for sequence, position in zip(sequences, positions, strict=True)]
            segments = [
                Segment(row, 1, sequence.slot, position)
                for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True))
            ]
            hidden = self._blocks([last[index] for index in active], positions, slots, segments, sequences)
            asked = [(sequence, position + 1) for sequence, position in zip(sequences, positions, strict=True)]
            chosen, draft_probs = self._choose(hidden, asked)
            for index, token, chance in zip(active, chosen.tolist(), draft_probs.tolist(), strict=True):
                last[index] = token
                drafted[index].append(token)
                draft_prob[index].append(chance)
        return [Proposal(tuple(ids), draft_prob=tuple(probs)) for ids, probs in zip(drafted, draft_prob, strict=True)]

    def _choose(self, hidden: Tensor, asked: Sequence[tuple[DraftSequence, int]]) -> tuple[Tensor, Tensor]:
        logits = self._target.head(self._rms_norm(hidden, self._norm)).float()
        return choose(logits, asked, self._config.vocab)

    def _blocks(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        segments: Sequence[Segment],
        sequences: Sequence[DraftSequence],
    ) -> Tensor:
        """Hidden states [rows, hidden] of block rows; their own K/V is scratch, overwritten once committed."""
        device = self._target.device
        return self._forward(
            self._target.embedding[torch.tensor(tokens, device=device)],
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            plan_block_attention(segments, [sequence.window_start for sequence in sequences]),
        )

    def _forward(
        self, x: Tensor, positions: Tensor, slots: Tensor, tiles: Sequence[Tile], *, all_layers: bool = True
    ) -> Tensor:
        """Hidden states of rows x [rows, hidden], whose K/V is written.

        ``all_layers`` False stops at the last layer's K/V.
        """
        config = self._config
        heads = config.heads + 2 * config.kv_heads
        cos, sin = self._rope_tables(positions)
        assert self.kv is not None
        for index, (layer, layer_kv) in enumerate(zip(self._layers, self.kv, strict=True)):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm)).view(-1, heads, config.head_dim)
            q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            qkv = torch.cat((self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm), v), dim=1)
            qkv = torch.addcmul(qkv * cos, qkv.roll(config.head_dim // 2, -1), sin)
            layer_kv.index_copy_(0, slots, qkv[:, config.heads :])
            if not all_layers and index == config.layers - 1:
                break
            x = layer.output.add(attend(qkv[:, : config.heads], layer_kv, tiles), x)
            normed = self._rms_norm(x, layer.post_norm)
            x = layer.down.add(layer.up.mul(normed, layer.gate.silu(normed)), x)
        return x

    def _rope_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope.tables(positions, self._target.dtype)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_eps)

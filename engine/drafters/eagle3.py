"""EAGLE-3: tokens are drafted one after another by a small decoder that goes on from the target's features.

A row stands at a position j and takes the token at j + 1 beside a hidden state: the target's fused features of j, or,
for drafted positions, where the target has not been yet, what the drafter itself made of the row before. It proposes
the token at j + 2. So a row can be made once the token after it is known: when a pass reads that token, or, for the row
before the block start, when tokens are drafted. Fused features stay beside the draft K/V until then.

Source: Li et al., EAGLE-3 (arXiv 2503.01840), in SGLang's ``LlamaForCausalLMEagle3`` format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.drafters import row_store
from redraft.engine.drafters.base import DraftSequence, Proposal, TargetRows
from redraft.engine.drafters.choosing import choose
from redraft.engine.drafters.eagle3_checkpoint import HEAD, check_fits, layer_names, load, target_ids
from redraft.engine.embedded.attention import Segment, Tile, attend, plan_attention, plan_block_attention
from redraft.engine.embedded.cache import new_kv
from redraft.engine.embedded.linear import Linear, make_linear
from redraft.engine.embedded.model import Target
from redraft.engine.embedded.rope import RotaryEmbedding
from redraft.engine.types import DrafterVersion


@dataclass(frozen=True, slots=True)
class Layer:
    hidden_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Eagle3Drafter:
    """A loaded checkpoint beside the target whose embedding, and head unless it has its own, it shares.

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
        self._ids = target_ids(tensors.pop("d2t")).to(target.device)
        weights = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items() if name != "t2d"}

        def linear(*names: str) -> Linear:
            return make_linear(torch.cat([weights[f"{name}.weight"] for name in names]), invariant=False)

        self._project = linear("fc")
        self._norm = weights["norm.weight"]
        self._input_norm = weights["midlayer.input_layernorm.weight"]
        self._head = make_linear(weights.get(HEAD, target.head_weight[self._ids]), invariant=False)
        self._layers = [
            Layer(
                hidden_norm=weights[f"{layer}.hidden_norm.weight"],
                qkv=linear(*[f"{layer}.self_attn.{name}_proj" for name in ("q", "k", "v")]),
                output=linear(f"{layer}.self_attn.o_proj"),
                post_norm=weights[f"{layer}.post_attention_layernorm.weight"],
                gate=linear(f"{layer}.mlp.gate_proj"),
                up=linear(f"{layer}.mlp.up_proj"),
                down=linear(f"{layer}.mlp.down_proj"),
            )
            for layer in layer_names(config.layers)
        ]
        self.kv: Tensor | None = self.new_kv(slots)

    def new_kv(self, slots: int) -> Tensor:
        """Each layer's K/V, and as many layers more as a row's fused features fill."""
        config, target = self._config, self._target
        layers = config.layers + row_store.layers_needed(config)
        return new_kv(layers, slots, 2 * config.kv_heads, config.head_dim, target.dtype, target.device)

    @torch.inference_mode()
    def materialise(self, rows: TargetRows) -> None:
        assert self.kv is not None
        row_store.write(self.kv[self._config.layers :], self._project(rows.features), rows.slots)
        device = rows.slots.device
        known: list[int] = []
        segments: list[Segment] = []
        for segment, window in zip(rows.segments, rows.windows, strict=True):
            first = max(segment.position - 1, window)
            end = segment.position + segment.rows - 1
            if first < end:
                segments.append(Segment(len(known), end - first, segment.slot + window, first - window))
                known += range(segment.row + segment.rows - (end - first), segment.row + segment.rows)
        if not known:
            return
        config = self._config
        after = torch.tensor(known, device=device)
        slots = rows.slots[after] - 1
        group, dtype = config.heads // config.kv_heads, self._target.dtype
        deep = config.layers > 1
        tiles = plan_attention(segments, group, invariant=False, dtype=dtype, device=device) if deep else []
        self._forward(rows.tokens[after], self._kept(slots), rows.positions[after] - 1, slots, tiles, all_layers=False)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        lengths = [self._length(sequence) for sequence in sequences]
        drafting = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length > 0]
        proposals = iter(self._draft(drafting) if drafting else ())
        return [next(proposals) if length > 0 else Proposal() for length in lengths]

    def _length(self, sequence: DraftSequence) -> int:
        """The row before the block start must be in the window, and the last one in room and context."""
        start = len(sequence.tokens) - 1
        if start <= sequence.window_start:
            return 0
        return min(sequence.length, self.block_size - 1, sequence.room - 1, self._config.context_length - start - 1)

    @torch.inference_mode()
    def _draft(self, drafting: Sequence[tuple[DraftSequence, int]]) -> list[Proposal]:
        device = self._target.device
        sequences = [sequence for sequence, _ in drafting]
        drafted: list[list[int]] = [[] for _ in drafting]
        draft_prob: list[list[float]] = [[] for _ in drafting]
        survival = [1.0] * len(drafting)
        active = list(range(len(drafting)))
        positions = [len(sequence.tokens) - 2 for sequence in sequences]
        tokens = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
        before = [sequence.slot + position for sequence, position in zip(sequences, positions, strict=True)]
        hidden = self._kept(torch.tensor(before, device=device))
        while active:
            at = torch.tensor([positions[each] for each in active], device=device)
            segments = [Segment(row, 1, sequences[each].slot, positions[each]) for row, each in enumerate(active)]
            slots = at + torch.tensor([sequences[each].slot for each in active], device=device)
            tiles = plan_block_attention(segments, [sequences[each].window_start for each in active])
            hidden = self._forward(tokens, hidden, at, slots, tiles)
            logits = self._head(self._rms_norm(hidden, self._norm)).float()
            asked = [(sequences[each], positions[each] + 2) for each in active]
            chosen, draft_probs = choose(logits, asked, self._config.vocab, self._ids)
            tokens, probabilities = self._ids[chosen], draft_probs.tolist()
            going_on = []
            for row, (each, token, probability) in enumerate(zip(active, tokens.tolist(), probabilities, strict=True)):
                drafted[each].append(token)
                draft_prob[each].append(probability)
                survival[each] *= probability
                positions[each] += 1
                if len(drafted[each]) < drafting[each][1] and survival[each] >= sequences[each].least_survival:
                    going_on.append(row)
            if len(going_on) < len(active):
                rows = torch.tensor(going_on, dtype=torch.int64, device=device)
                tokens, hidden = tokens[rows], hidden[rows]
                active = [active[row] for row in going_on]
        return [Proposal(tuple(ids), draft_prob=tuple(probs)) for ids, probs in zip(drafted, draft_prob, strict=True)]

    def _forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        tiles: Sequence[Tile],
        *,
        all_layers: bool = True,
    ) -> Tensor:
        """Hidden states [rows, hidden] of rows of ``tokens`` and ``hidden`` [rows, hidden], whose K/V is written.

        ``all_layers`` False stops at the last layer's K/V.
        """
        config = self._config
        heads = config.heads + 2 * config.kv_heads
        cos, sin = self._rope.tables(positions, self._target.dtype)
        embedded = self._rms_norm(self._target.embedding[tokens], self._input_norm)
        assert self.kv is not None
        x = hidden
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(x, layer.hidden_norm)
            inputs = torch.cat((embedded, normed), dim=-1) if index == 0 else normed
            qkv = layer.qkv(inputs).view(-1, heads, config.head_dim)
            qkv = torch.addcmul(qkv * cos, qkv.roll(config.head_dim // 2, -1), sin)
            self.kv[index].index_copy_(0, slots, qkv[:, config.heads :])
            if not all_layers and index == config.layers - 1:
                break
            x = layer.output.add(attend(qkv[:, : config.heads], self.kv[index], tiles), x)
            normed = self._rms_norm(x, layer.post_norm)
            x = layer.down.add(layer.up.mul(normed, layer.gate.silu(normed)), x)
        return x

    def _kept(self, slots: Tensor) -> Tensor:
        assert self.kv is not None
        return row_store.read(self.kv[self._config.layers :], slots, self._config.hidden)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_eps)

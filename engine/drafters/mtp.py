"""Parallel heads on the target's last hidden state, as of multi-token prediction: the baseline of drafters.

Each head has a residual layer of its own over what one matrix makes of the last committed token and the hidden state
before it, and proposes one slot of the block. No slot knows what the others propose.

Source: after Medusa (Cai et al., arXiv 2401.10774) and the input of DeepSeek-V3's MTP module (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.drafters import row_store
from redraft.engine.drafters.base import DraftSequence, Proposal, TargetRows
from redraft.engine.drafters.choosing import choose
from redraft.engine.drafters.mtp_checkpoint import check_fits, load
from redraft.engine.embedded.cache import new_kv
from redraft.engine.embedded.linear import make_linear
from redraft.engine.embedded.model import Target
from redraft.engine.types import DrafterVersion


class MtpDrafter:
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
        weights = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
        self._fuse = make_linear(weights["fc.weight"], invariant=False)
        self._heads = make_linear(
            torch.cat([weights[f"heads.{slot}.weight"] for slot in range(config.block_size - 1)]), invariant=False
        )
        self._embedding_norm = weights["embedding_norm.weight"]
        self._hidden_norm = weights["hidden_norm.weight"]
        self._norm = weights["norm.weight"]
        self.kv: Tensor | None = self.new_kv(slots)

    def new_kv(self, slots: int) -> Tensor:
        """No K/V, but the rows' hidden states."""
        config, target = self._config, self._target
        layers = row_store.layers_needed(config)
        return new_kv(layers, slots, 2 * config.kv_heads, config.head_dim, target.dtype, target.device)

    @torch.inference_mode()
    def materialise(self, rows: TargetRows) -> None:
        assert self.kv is not None
        row_store.write(self.kv, rows.features, rows.slots)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        lengths = [self._length(sequence) for sequence in sequences]
        drafting = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length > 0]
        proposals = iter(self._draft(drafting) if drafting else ())
        return [next(proposals) if length > 0 else Proposal() for length in lengths]

    def _length(self, sequence: DraftSequence) -> int:
        """The row before the block start must be in the window."""
        seen = len(sequence.tokens) - 1 > sequence.window_start
        return min(sequence.length, self.block_size - 1) if seen else 0

    @torch.inference_mode()
    def _draft(self, drafting: Sequence[tuple[DraftSequence, int]]) -> list[Proposal]:
        config, device = self._config, self._target.device
        tokens = torch.tensor([sequence.tokens[-1] for sequence, _ in drafting], device=device)
        before = [sequence.slot + len(sequence.tokens) - 2 for sequence, _ in drafting]
        assert self.kv is not None
        hidden = row_store.read(self.kv, torch.tensor(before, device=device), config.hidden)
        embedded = self._rms_norm(self._target.embedding[tokens], self._embedding_norm)
        fused = self._fuse(torch.cat((embedded, self._rms_norm(hidden, self._hidden_norm)), dim=-1))
        slots = fused[:, None] + self._heads.silu(fused).view(len(drafting), -1, config.hidden)
        wanted = torch.cat([slots[row, :length] for row, (_, length) in enumerate(drafting)])
        logits = self._target.head(self._rms_norm(wanted, self._norm)).float()
        asked = [(sequence, len(sequence.tokens) + slot) for sequence, length in drafting for slot in range(length)]
        chosen, draft_probs = choose(logits, asked, config.vocab)
        ids, probs = iter(chosen.tolist()), iter(draft_probs.tolist())
        return [Proposal(tuple(islice(ids, length)), draft_prob=tuple(islice(probs, length))) for _, length in drafting]

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_eps)

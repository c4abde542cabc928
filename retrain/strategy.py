"""Blocks in the training loop: what every drafter learns from, whichever way it drafts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from redraft.retrain.blocks import block_labels, choose_blocks
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.features import Captured
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.losses import LossTerms, Weigh, block_loss, dpace, prefix_decay
from redraft.retrain.paradigms.base import DraftModel
from redraft.retrain.provenance import Provenance, model_card
from redraft.retrain.saving import written

FEATURE_BLOCK = 64
"""Contexts are padded to a multiple of this."""


class BlockStrategy:
    """Draws blocks in the supervised spans and learns what the target said there."""

    def __init__(self, model: DraftModel, target: FrozenTarget, config: TrainConfig, record: Provenance) -> None:
        self.model = model
        self._target = target
        self._config = config
        self._record = record
        self._head = model.head(target.head)
        self._weigh: Weigh = prefix_decay(config.gamma) if config.weights == "prefix_decay" else dpace

    def length(self, sample: Sample) -> int:
        return max((end for start, end in self._spans(sample) if end - start > 1), default=0)

    def _spans(self, sample: Sample) -> list[tuple[int, int]]:
        """Those that lie within the target's context."""
        return [span for span in sample.spans if span[1] <= self.model.config.context_length]

    def loss(self, samples: Sequence[Sample], captured: Sequence[Captured], generator: torch.Generator) -> LossTerms:
        config, size = self._config, self.model.config.block_size
        device = self._target.head.device
        chosen = [choose_blocks(self._spans(sample), config.blocks, generator) for sample in samples]
        shape = (len(samples), max(1, *map(len, chosen)))
        starts = torch.zeros(shape, dtype=torch.int64)
        labels = torch.zeros((*shape, size - 1), dtype=torch.int64)
        valid = torch.zeros((*shape, size - 1), dtype=torch.bool)
        for row, (sample, blocks) in enumerate(zip(samples, chosen, strict=True)):
            tokens, count = torch.tensor(sample.token_ids), len(blocks)
            starts[row, :count] = blocks[:, 0]
            labels[row, :count], valid[row, :count] = block_labels(tokens, blocks, size)
        width = max(1, -(-int(starts.max()) // FEATURE_BLOCK)) * FEATURE_BLOCK
        ids = padded([torch.tensor(sample.token_ids)[:, None] for sample in samples], width + size)[:, :, 0]
        starts, ids, labels, valid = (_moved(each, device) for each in (starts, ids, labels, valid))
        features = padded([each.features for each in captured], width)
        hidden = self.model.taught(features, ids, starts, self._target.embedding, config.context_window)
        teacher = self._teacher(captured, starts, width + size) if config.loss == "distribution" else None
        wanted = self.model.labels(labels).flatten(0, 1)
        return block_loss(hidden.flatten(0, 1), self._head, wanted, valid.flatten(0, 1), self._weigh, teacher)

    def export(self, folder: Path, step: int) -> None:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with written(partial):
            self.model.save(partial, model_card(self.model.title, self.model.card, self._record, step))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def _teacher(self, captured: Sequence[Captured], starts: Tensor, width: int) -> Tensor:
        """Normed hidden states [blocks, slots, hidden] of the target's rows that predict the slots' labels."""
        hidden = padded([each.hidden for each in captured], width)
        rows = starts[:, :, None] + torch.arange(self.model.config.block_size - 1, device=starts.device)
        sequences = torch.arange(len(captured), device=starts.device)[:, None, None]
        return self._target.normed(hidden[sequences, rows]).flatten(0, 1)


def padded(parts: Sequence[Tensor], width: int) -> Tensor:
    """[parts, width, size] of parts [rows, size], cut or filled with zeros."""
    batch = torch.zeros((len(parts), width, parts[0].shape[1]), dtype=parts[0].dtype, device=parts[0].device)
    for row, part in enumerate(parts):
        rows = min(width, len(part))
        batch[row, :rows] = part[:rows]
    return batch


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

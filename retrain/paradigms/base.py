"""What training, replay and gate ask of a way of drafting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from redraft.engine.drafters.checkpoint import DrafterConfig
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.frozen import FrozenTarget

BLOCKS_PER_PASS = 128
"""Blocks that `DraftModel.proposals` drafts at once; bounds its memory."""


class DraftModel(nn.Module, ABC):
    """A drafter of fp32 weights, named as in its checkpoint; ``title`` and ``card`` are for people."""

    title: str
    card: str
    config: DrafterConfig

    @classmethod
    @abstractmethod
    def create(cls, target: FrozenTarget, config: TrainConfig, samples: Sequence[Sample]) -> Self:
        """An untrained one, as ``config`` says, to learn from ``samples``; raises `TrainingError`, `DrafterError`."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """The drafter of a checkpoint folder; raises `DrafterError`."""

    @abstractmethod
    def save(self, folder: Path, card: str) -> None:
        """Write a checkpoint folder."""

    @abstractmethod
    def check_fits(self, target: FrozenTarget, where: Path) -> None:
        """Raises `DrafterError` if it is no drafter of the target."""

    @abstractmethod
    def recipe(self, config: TrainConfig) -> TrainConfig:
        """The recipe with this drafter's own shape in it."""

    @abstractmethod
    def taught(self, features: Tensor, ids: Tensor, starts: Tensor, embedding: Tensor, window: int | None) -> Tensor:
        """Hidden states [sequences, blocks, block_size - 1, hidden] from which the head drafts, along the true answer.

        features [sequences, positions, layers * hidden] from position 0 and ids [sequences, more positions] int64,
        padded with anything; starts [sequences, blocks] int64: block starts, of which a dead block's is 0; embedding
        [vocab, hidden]: the target's. A block sees the features before its start, of the last ``window`` positions at
        most, and no later one.
        """

    @abstractmethod
    def proposals(self, features: Tensor, ids: Tensor, starts: Tensor, target: FrozenTarget) -> list[list[int]]:
        """What it drafts at each of starts [blocks] int64, greedily, as it would in serving.

        features [positions, layers * hidden] and ids [positions] int64 are of one sequence.
        """

    def head(self, head: Tensor) -> Tensor:
        """The rows [drafted tokens, hidden] of the target's ``head`` that it drafts with."""
        return head

    def labels(self, ids: Tensor) -> Tensor:
        """The rows of `head` that tokens ``ids`` have; -1 for those that it cannot draft."""
        return ids

"""The target as training sees it: it makes features and lends its embedding, last norm and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.checkpoints import identity, validate
from redraft.engine.embedded.linear import product_dtype
from redraft.engine.embedded.model import Target
from redraft.retrain.config import TrainConfig
from redraft.retrain.errors import TrainingError


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """A loaded target and its head [vocab, hidden], in torch's own layout and the type to multiply in."""

    target: Target
    head: Tensor
    identity: str

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Raises `CheckpointError` if the folder is no sound checkpoint."""
        target = Target(folder, validate(folder), device=device, dtype=dtype, invariant=False)
        head = target.head_weight
        return cls(target, head.to(product_dtype(head)), identity(folder))

    @property
    def embedding(self) -> Tensor:
        return self.target.embedding

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head takes, from hidden states before the last norm."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.target.norm, self.target.config.rms_eps)


def load_target(folder: Path, config: TrainConfig) -> FrozenTarget:
    """As a recipe says: where, and in which dtype."""
    return FrozenTarget.load(folder, pick_device(config.device), getattr(torch, config.dtype))


def pick_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one; raises `TrainingError` for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device is cuda, but torch finds no GPU here; use device: auto or cpu")
    return torch.device(name)

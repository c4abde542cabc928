"""The ways of drafting that can be trained, by the names that drafter versions give them."""

from __future__ import annotations

from pathlib import Path

import torch

from redraft.engine.drafters.loading import kind_of
from redraft.retrain.paradigms.base import DraftModel
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.paradigms.eagle3 import Eagle3Model
from redraft.retrain.paradigms.mtp import MtpModel

PARADIGMS: dict[str, type[DraftModel]] = {"dflash": DFlashModel, "eagle3": Eagle3Model, "mtp": MtpModel}


def load_model(folder: Path, device: torch.device) -> DraftModel:
    """The drafter of a checkpoint folder, of whatever kind; raises `DrafterError`."""
    return PARADIGMS[kind_of(folder)].load(folder, device)

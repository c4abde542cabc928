"""One DFlash training run, from a folder of data to a folder with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from redraft.engine.checkpoints import resolve
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, check_fits
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.splits import Split
from redraft.retrain.data.store import load_samples
from redraft.retrain.dflash.model import DFlashModel
from redraft.retrain.dflash.strategy import DFlashStrategy
from redraft.retrain.errors import TrainingError
from redraft.retrain.features import FeatureCache, FeatureCapture, cache_budget
from redraft.retrain.frozen import FrozenTarget, pick_device
from redraft.retrain.provenance import data_of, provenance
from redraft.retrain.trainer import STATE, Progress, Trainer, silent

TRAIN: tuple[Split, ...] = ("train",)


def train(
    data: Path,
    out: Path,
    config: TrainConfig,
    *,
    model: str,
    resume: bool = False,
    commit: str | None = None,
    progress: Progress = silent,
) -> None:
    """Train a drafter for the target ``model`` on ``data``'s train split; the checkpoint is ``out``/drafter.

    Raises `TrainingError`, `DataError` or `CheckpointError`.
    """
    if (out / STATE).exists() and not resume:
        raise TrainingError(f"{out} already holds a run; resume it, or name another folder")
    device = pick_device(config.device)
    target = FrozenTarget.load(resolve(model), device, getattr(torch, config.dtype))
    data_hash = data_of(data, target.identity)
    samples = list(load_samples(data, TRAIN))
    if not samples:
        raise TrainingError(f"{data} holds no answers to learn from; have some made: redraft data generate {data}")
    record = provenance(
        config,
        target=target.identity,
        data=data_hash,
        samples=len(samples),
        tokens=sum(end - start for sample in samples for start, end in sample.spans),
        commit=commit,
    )
    shape = DFlashConfig.for_target(
        target.target.config,
        target.identity,
        layers=config.layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    if len(set(shape.feature_layers)) < config.layers:
        raise TrainingError(
            f"layers: {config.layers} are too many for a target of {target.target.config.layers} layers"
        )
    check_fits(shape, target.target.config, target.identity, out)
    capture = FeatureCapture(target.target, shape.feature_layers)
    cache = FeatureCache(capture, cache_budget(config.cache_bytes, device), hidden=config.loss == "distribution")
    strategy = DFlashStrategy(DFlashModel(shape, device, config.seed), target, config, record)
    trainer = Trainer(strategy, samples, cache, config, out, record)
    if resume:
        trainer.resume()
    trainer.run(progress)

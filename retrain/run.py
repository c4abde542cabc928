"""One training run, from a folder of data to a folder with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from redraft.engine.checkpoints import resolve
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.data.splits import Split
from redraft.retrain.data.store import load_samples
from redraft.retrain.errors import TrainingError
from redraft.retrain.features import FeatureCache, FeatureCapture, cache_budget
from redraft.retrain.features_store import MemoryStore
from redraft.retrain.frozen import load_target
from redraft.retrain.paradigms.kinds import PARADIGMS
from redraft.retrain.provenance import data_of, provenance
from redraft.retrain.replay import ModelReplay
from redraft.retrain.strategy import BlockStrategy
from redraft.retrain.trainer import STATE, HeldOut, Progress, Trainer, silent

TRAIN: tuple[Split, ...] = ("train",)
HELD_OUT: tuple[Split, ...] = ("calibrate",)


def train(
    kind: str,
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

    ``kind`` is one of `redraft.retrain.paradigms.kinds.PARADIGMS`.
    Raises `TrainingError`, `DataError` or `CheckpointError`.
    """
    if (out / STATE).exists() and not resume:
        raise TrainingError(f"{out} already holds a run; resume it, or name another folder")
    target = load_target(resolve(model), config)
    device = target.target.device
    data_hash = data_of(data, target.identity)
    samples = list(load_samples(data, TRAIN))
    if not samples:
        raise TrainingError(f"{data} holds no answers to learn from; have some made: redraft data generate {data}")
    record = provenance(
        config,
        target=target.identity,
        data=data_hash,
        samples=samples,
        commit=commit,
    )
    drafter = PARADIGMS[kind].create(target, config, samples)
    drafter.check_fits(target, out)
    shape = drafter.config
    capture = FeatureCapture(target.target, shape.feature_layers)
    store = MemoryStore(cache_budget(config.cache_bytes, device))
    teacher = config.loss == "distribution"
    cache = FeatureCache(capture, store, target, layers=shape.feature_layers, hidden=teacher)
    strategy = BlockStrategy(drafter, target, config, record)
    held_out = spread(
        (each for each in load_samples(data, HELD_OUT) if can_judge(each, shape.context_length)), config.held_out
    )
    judges = HeldOut(held_out, ModelReplay(drafter, target, capture)) if held_out else None
    trainer = Trainer(strategy, samples, cache, config, out, record, judges)
    if resume:
        trainer.resume()
    trainer.run(progress)


def can_judge(sample: Sample, context_length: int) -> bool:
    """Whether a sample may be held out: greedy, so that replay is what serving would do, and as serving takes it."""
    return sample.greedy and not sample.looping and len(sample.token_ids) <= context_length


def spread(samples: Iterable[Sample], count: int) -> list[Sample]:
    """``count`` at most, evenly."""
    found = list(samples)
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]

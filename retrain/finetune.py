"""Fine-tuning: the serving drafter learns from the traffic in which it was rejected.

A run reads the features that its steps need, session by session, and then trains; both in short passes, between which
it waits while serving is busy. What chooses the step is the accept length on held-out sessions, never the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from redraft.engine.drafters.loading import content_id
from redraft.engine.types import AcceptLength
from redraft.retrain.background import Duty, stopped_by_signals
from redraft.retrain.config import TrainConfig
from redraft.retrain.errors import TrainingError
from redraft.retrain.features import CAPTURE_ROWS, FeatureCache, PatientCapture
from redraft.retrain.features_store import FeatureStore
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.provenance import Provenance, provenance
from redraft.retrain.replay import ModelReplay
from redraft.retrain.run import spread
from redraft.retrain.strategy import BlockStrategy
from redraft.retrain.traffic import TrafficData
from redraft.retrain.trainer import BEST, DRAFTER, STATE, HeldOut, Progress, Trainer, silent

FINETUNE = Path(str(files("redraft.retrain"))) / "finetune.yaml"
"""The recipe where nobody names another."""


class Candidate(Struct, frozen=True):
    """A fine-tuned drafter's folder and where it comes from.

    ``step`` is the one whose weights these are: 0 if no step drafted better on the held-out sessions than the serving
    drafter, whose accept length there is ``before``. Both lengths are None where there was no session to hold out.
    """

    folder: Path
    step: int
    before: AcceptLength | None
    after: AcceptLength | None
    provenance: Provenance


def finetune(
    data: TrafficData,
    *,
    target: FrozenTarget,
    serving: Path,
    out: Path,
    config: TrainConfig,
    features: FeatureStore,
    busy: Callable[[], bool] = lambda: False,
    commit: str | None = None,
    progress: Progress = silent,
) -> Candidate:
    """Train ``serving``, a drafter of the target, on ``data`` in folder ``out``; a run that is there goes on.

    To be called in a process of its own, after `redraft.retrain.background.be_background`. Held-out answers that were
    sampled are replayed as if they were greedy: too low an accept length, but one that ranks steps alike.
    Its shape is the serving drafter's, whatever ``config`` says. SIGTERM and SIGINT save the
    state and raise `Stopped`. Raises `TrainingError` where there is nothing to learn from or ``out`` holds another run,
    `DrafterError` if ``serving`` is no drafter of the target.
    """
    if data.target != target.identity:
        raise TrainingError(f"the data are of target {data.target[:12]}, this one is {target.identity[:12]}")
    device = target.target.device
    model = load_model(serving, device)
    model.check_fits(target, serving)
    shape, config = model.config, model.recipe(config)
    samples = [*data.train, *data.replay]
    record = provenance(
        config,
        target=target.identity,
        data=data.digest,
        samples=samples,
        commit=commit,
        initial=content_id(serving),
    )
    with stopped_by_signals() as stop:
        duty = Duty(busy, stop)
        capture = PatientCapture(target.target, shape.feature_layers, CAPTURE_ROWS[device.type], duty)
        cache = FeatureCache(
            capture,
            features,
            target,
            layers=shape.feature_layers,
            hidden=config.loss == "distribution",
        )
        chosen = [each for each in data.validation if len(each.token_ids) <= shape.context_length]
        held_out = spread(chosen, config.held_out)
        judges = HeldOut(held_out, ModelReplay(model, target, cache.features)) if held_out else None
        strategy = BlockStrategy(model, target, config, record)
        trainer = Trainer(strategy, samples, cache, config, out, record, judges, duty)
        if (out / STATE).exists():
            trainer.resume()
        needed = sorted(trainer.drawn(), key=lambda sample: sample.token_ids)
        for number, sample in enumerate(needed, 1):
            cache([sample], [strategy.length(sample)])
            progress(number, len(needed), "features")
        trainer.run(progress)
    best = trainer.best
    return Candidate(
        folder=out / (DRAFTER if best is None else BEST),
        step=config.steps if best is None else best.step,
        before=trainer.evaluated[0].length if best else None,
        after=best.length if best else None,
        provenance=record,
    )

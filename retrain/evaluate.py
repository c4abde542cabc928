"""Accept lengths of a checkpoint and of the floor on recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from redraft.engine.checkpoints import resolve
from redraft.engine.drafters.loading import kind_of
from redraft.retrain.data.splits import Split
from redraft.retrain.data.store import load_samples
from redraft.retrain.errors import TrainingError
from redraft.retrain.frozen import FrozenTarget, pick_device
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.provenance import data_of
from redraft.retrain.replay import AcceptCounts, ModelReplay, NgramReplay, Replayed, pooled, replay
from redraft.retrain.trainer import DRAFTER, Progress, silent


def evaluate(
    run: Path, data: Path, *, model: str, split: Split, device: str = "auto", progress: Progress = silent
) -> list[dict[str, Any]]:
    """A row a drafter, source (or ``all``, ``looping``) and block length, by replay of greedy answers.

    ``run`` is a run's folder or a checkpoint's. Raises `TrainingError`, `DataError` or
    `CheckpointError`.
    """
    folder = run / DRAFTER if (run / DRAFTER).is_dir() else run
    at = pick_device(device)
    target = FrozenTarget.load(resolve(model), at, torch.bfloat16)
    drafter = load_model(folder, at)
    drafter.check_fits(target, folder)
    data_of(data, target.identity)
    longest = drafter.config.block_size - 1
    lengths = sorted({1, *range(3, longest, 2), longest})
    context = target.target.config.context_length
    samples = [each for each in load_samples(data, (split,)) if each.greedy and len(each.token_ids) <= context]
    if not samples:
        raise TrainingError(f"{data} holds no greedy answers of the split {split}; there is nothing to replay")
    rows = []
    for name, proposals in ((kind_of(folder), ModelReplay(drafter, target)), ("ngram", NgramReplay(longest))):
        replayed: list[Replayed] = []
        for each in replay(samples, proposals, lengths):
            replayed.append(each)
            progress(len(replayed), len(samples), name)
        groups = pooled(replayed, lambda sample: "all") | pooled(replayed, lambda sample: sample.source)
        rows += [
            _row(name, split, source, length, counts)
            for source, by_length in groups.items()
            for length, counts in by_length.items()
        ]
    return rows


def _row(drafter: str, split: str, source: str, length: int, counts: AcceptCounts) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "split": split,
        "source": source,
        "block_length": length,
        "tau": counts.length.tau,
        "committed": counts.committed,
        "verify_steps": counts.verify_steps,
        "hazard": counts.hazard,
        "reached": counts.reached,
        "accepted": counts.accepted,
    }

"""Both drafters on the same recorded answers: what they would have committed, and at what cost."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import inf
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from msgspec import Struct

from redraft.engine.drafters.base import DraftSequence, TargetRows
from redraft.engine.drafters.loading import load_config, load_folder, version_of
from redraft.engine.embedded.attention import Segment, arena_slots
from redraft.engine.embedded.cache import pages
from redraft.engine.policy.cost import CostTable
from redraft.engine.types import DrafterVersion, context_bucket, is_looping
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import TrainingError
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.replay import AcceptCounts, Drafting, ReplayStep, count, steps

WARM_UPS = 5
ROUNDS = 60
FILL = 0.01
"""What stands for features and draft K/V, so that they take memory as real ones do."""

NOISE = 1.5
"""Ratio up to which two drafters of one shape cost the same, whatever a busy machine says."""

StepCost = Callable[[ReplayStep], float]
"""Milliseconds of a request's part in a verify step."""


class DraftCost(Struct, frozen=True, kw_only=True):
    """Milliseconds of a draft in this process, the best of interleaved rounds; the floor's are None.

    ``ratio`` is what the old drafter's measured cost is multiplied by to be the new one's.
    """

    old_ms: float | None
    new_ms: float
    ratio: float | None
    same_shape: bool
    rounds: int
    context: int
    sequences: int


class Answer(Struct, frozen=True):
    """A recorded answer, the sample's one span, under both drafters; milliseconds are of its passes and drafts.

    ``new_by_bucket`` splits ``new`` by the context bucket of a step's last committed position, as serving counts.
    """

    sample: Sample
    looping: bool
    old: AcceptCounts
    new: AcceptCounts
    old_ms: float
    new_ms: float
    new_by_bucket: dict[int, AcceptCounts] = {}


def replayed(
    samples: Iterable[Sample],
    old: Drafting,
    new: Drafting,
    block_length: int,
    old_cost: StepCost,
    new_cost: StepCost,
) -> Iterator[Answer]:
    """Replay every answer of samples, those that begin alike in a row, so that what they share is captured once."""
    for sample in sorted(samples, key=lambda sample: (sample.token_ids, sample.session, sample.id)):
        by_old, by_new = old(sample), new(sample)
        for start, end in sample.spans:
            answer = msgspec.structs.replace(sample, spans=((start, end),))
            under_old = list(steps(answer, by_old, block_length))
            under_new = list(steps(answer, by_new, block_length))
            yield Answer(
                answer,
                sample.looping or is_looping(sample.token_ids[start:end]),
                count(under_old, block_length),
                count(under_new, block_length),
                sum(map(old_cost, under_old)),
                sum(map(new_cost, under_new)),
                {bucket: count(part, block_length) for bucket, part in _by_bucket(under_new).items()},
            )


def _by_bucket(walked: Iterable[ReplayStep]) -> dict[int, list[ReplayStep]]:
    buckets: dict[int, list[ReplayStep]] = defaultdict(list)
    for step in walked:
        buckets[context_bucket(step.position + step.committed)].append(step)
    return buckets


def check_measured(costs: CostTable, version: DrafterVersion) -> None:
    """Raises `TrainingError` where the engine has not measured what a version's drafts cost."""
    if version.id not in costs.draft:
        raise TrainingError(
            f"the engine has not measured what drafts of version {version.id} cost; let it serve (engine.drafter: "
            f"{version.kind}), wait until the engine has nothing to run, and try again"
        )


def step_costs(costs: CostTable, old: DrafterVersion, drafts: DraftCost) -> tuple[StepCost, StepCost]:
    """Cost of a step with the old and with the new drafter, at the load that drafts were measured at."""
    sequences = drafts.sequences
    if drafts.ratio is not None:
        check_measured(costs, old)
    grid = costs.draft.get(old.id)

    def verify(step: ReplayStep) -> float:
        return costs.verify.at(sequences * (step.block_length + 1), step.position)

    def draft(step: ReplayStep) -> float:
        return grid.at(sequences, step.position) if grid else 0.0

    def new_draft(step: ReplayStep) -> float:
        return drafts.new_ms if drafts.ratio is None else drafts.ratio * draft(step)

    return (
        lambda step: (draft(step) + verify(step)) / sequences,
        lambda step: (new_draft(step) + verify(step)) / sequences,
    )


def measure_drafts(
    old: Path | None, new: Path, target: FrozenTarget, *, context: int, sequences: int, rounds: int = ROUNDS
) -> DraftCost:
    """Time both drafters in turn on the same inputs, through the engine's own drafter.

    The best of many rounds is what neighbours on the machine disturb least. Two of one shape do the same arithmetic, so
    their ratio is 1 unless it is far above. ``old`` None is the floor, which takes next to nothing: the new drafter's
    milliseconds then stand for themselves.
    """
    folders = [new] if old is None else [new, old]
    configs = [load_config(folder) for folder in folders]
    slots = pages(context + max(config.block_size for config in configs))
    timed = [_draft(folder, target, context, sequences, slots) for folder in folders]
    best = [inf for _ in folders]
    order = random.Random(0)
    for round_ in range(WARM_UPS + rounds):
        for which in order.sample(range(len(timed)), len(timed)):
            started = perf_counter()
            timed[which]()
            if round_ >= WARM_UPS:
                best[which] = min(best[which], (perf_counter() - started) * 1e3)
    new_ms, old_ms = best[0], best[-1]
    same_shape = old is not None and configs[0] == configs[-1]
    ratio = new_ms / old_ms
    if same_shape and ratio < NOISE:
        ratio = 1.0
    return DraftCost(
        old_ms=None if old is None else old_ms,
        new_ms=new_ms,
        ratio=None if old is None else ratio,
        same_shape=same_shape,
        rounds=rounds,
        context=context,
        sequences=sequences,
    )


def _draft(folder: Path, target: FrozenTarget, context: int, sequences: int, slots: int) -> Callable[[], None]:
    """What a pass costs in drafts: a block for each sequence, and the draft K/V of as many rows."""
    drafter = load_folder(folder, version_of(folder), target.target, target.identity, sequences * slots)
    assert drafter.kv is not None
    drafter.kv.fill_(FILL)
    rows, device = load_config(folder).block_size, target.target.device
    begin = max(0, context - rows)
    segments = [Segment(index * rows, rows, index * slots, begin) for index in range(sequences)]
    drafting = [
        DraftSequence(tokens=[0] * context, length=rows - 1, slot=segment.slot, room=slots - context + 1)
        for segment in segments
    ]
    width = len(drafter.feature_layers) * target.target.config.hidden
    positions = torch.arange(begin, begin + rows, device=device).repeat(sequences)
    read = TargetRows(
        features=torch.full((len(positions), width), FILL, dtype=target.target.dtype, device=device),
        tokens=torch.zeros_like(positions),
        positions=positions,
        slots=arena_slots(positions, segments),
        segments=segments,
        windows=[0] * sequences,
    )

    def draft() -> None:
        drafter.materialise(read)
        drafter.propose(drafting)

    return draft

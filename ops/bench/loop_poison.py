"""Candidates that the loop's gate must refuse, made from one run's own traffic and offered to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.types import GREEDY, GenerationRequest, StopConditions, is_looping
from redraft.ops.bench.report import progress
from redraft.ops.demo import finale
from redraft.ops.demo.results import Refused
from redraft.ops.demo.story import Story
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.features_store import LocalStore
from redraft.retrain.finetune import finetune
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate.judge import judge
from redraft.retrain.gate.poisoned import deepened, misled, unmarked
from redraft.retrain.gate.seen import TrainingRecord
from redraft.retrain.traffic import TrafficData

LOOPING = 8
"""Looping answers to learn from, and as many to judge by."""

LOOPING_TOKENS = 160

AT_ONCE = 8

JUDGES = 40
"""Sessions of new traffic, and anchors: a third may be set aside for repeating what training saw."""


@dataclass(frozen=True)
class Offer:
    """A poisoned candidate; ``seen`` is what it learnt from, ``gate`` what it is judged by."""

    poison: str
    folder: Path
    seen: TrainingRecord
    gate: Sequence[Sample]


async def offer_all(
    story: Story, engine: EmbeddedEngine, old: Path, new: Path, target: FrozenTarget, work: Path, *, quick: bool
) -> list[Refused]:
    """What the gate says of each; ``quick`` makes only those that need no training."""
    data = finale.run_data(story, story.served.config.traffic.model_copy(update={"judging_sessions": JUDGES}))
    costs = await engine.costs()
    poisons = [*_untrained(data, new, work)]
    if not quick:
        learnt = await looping_answers(engine, data.replay, LOOPING)
        judging = await looping_answers(engine, [*data.gate, *data.train], LOOPING)
        poisons += await asyncio.to_thread(lambda: list(_trained(data, learnt, judging, old, target, work)))
    refused = []
    for offer in poisons:
        progress(f"poisoned: {offer.poison}")
        report = await asyncio.to_thread(
            judge,
            offer.gate,
            data.anchor,
            old=old,
            new=offer.folder,
            target=target,
            costs=costs,
            engine=finale.idle_engine(story),
            seen=offer.seen,
            block_length=story.served.config.engine.block_size - 1,
            config=story.served.config.gate,
        )
        verdict = report.verdict
        refused.append(Refused(poison=offer.poison, outcome=verdict.outcome, rule=verdict.rule, reason=verdict.reason))
    return refused


async def looping_answers(engine: EmbeddedEngine, samples: Sequence[Sample], wanted: int) -> list[Sample]:
    """Looping answers of the target to these prompts: what it says when it may not end an answer."""
    found: list[Sample] = []
    for first in range(0, len(samples), AT_ONCE):
        group = samples[first : first + AT_ONCE]
        found += filter(None, await asyncio.gather(*(_looping_answer(engine, sample) for sample in group)))
        progress(f"{len(found)} of {wanted} looping answers")
        if len(found) >= wanted:
            break
    return found[:wanted]


async def _looping_answer(engine: EmbeddedEngine, sample: Sample) -> Sample | None:
    end = sample.spans[-1][1]
    name = f"looping-{sample.id}"
    tokens: list[int] = []
    request = GenerationRequest(
        request_id=name,
        prompt_ids=sample.token_ids[:end],
        stopping=StopConditions(max_tokens=LOOPING_TOKENS, ignore_eos=True),
        sampling=GREEDY,
    )
    async for commit in engine.generate(request):
        tokens += commit.token_ids
    if not is_looping(tokens):
        return None
    ids = (*sample.token_ids[:end], *tokens)
    return replace(sample, id=name, session=name, token_ids=ids, spans=((end, len(ids)),), looping=True)


def _untrained(data: TrafficData, new: Path, work: Path) -> Iterable[Offer]:
    learnt = TrainingRecord.of([*data.train, *data.replay, *data.validation])
    deepened(new, work / "slow", finale.DEAD_LAYERS)
    yield Offer("accepts more, drafts cost more than that saves", work / "slow", learnt, data.gate)
    yield Offer("learnt from sessions that judge it", new, learnt | TrainingRecord.of(data.gate), data.gate)


def _trained(
    data: TrafficData, learnt: Sequence[Sample], judging: Sequence[Sample], old: Path, target: FrozenTarget, work: Path
) -> Iterable[Offer]:
    block = 16
    token = 0
    forgetting = [*data.train, *itertools.islice(misled(data.replay, block, token), len(data.train))]
    yield Offer(
        "better on new traffic, worse on anchors",
        _fine_tuned(data, forgetting, 1e-3, old, target, work / "forgetting"),
        TrainingRecord.of(forgetting),
        data.gate,
    )
    repeating = list(unmarked(learnt))
    yield Offer(
        "better only where answers loop",
        _fine_tuned(data, repeating, 3e-4, old, target, work / "looping"),
        TrainingRecord.of(repeating),
        [*data.gate, *judging],
    )


def _fine_tuned(
    data: TrafficData, samples: Sequence[Sample], rate: float, serving: Path, target: FrozenTarget, out: Path
) -> Path:
    """A candidate of the last step: nothing is held out that could choose an earlier one."""
    progress(f"training {out.name}")
    config = TrainConfig(
        steps=60, sequences=4, blocks=16, loss="tokens", learning_rate=rate, warmup=5, held_out=0, pass_tokens=1 << 13
    )
    poison = replace(data, train=tuple(samples), replay=(), validation=())
    store = LocalStore(out / "features", 8 << 30)
    return finetune(poison, target=target, serving=serving, out=out, config=config, features=store).folder

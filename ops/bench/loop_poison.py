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

LOOPING = 20
"""Looping answers: half to learn from, half to judge by."""

LOOPING_TOKENS = 160

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
    looping = [] if quick else await looping_answers(engine, [*data.train, *data.gate], LOOPING)
    refused = []
    for offer in await asyncio.to_thread(lambda: list(_offers(data, looping, new, old, target, work, quick))):
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


async def looping_answers(engine: EmbeddedEngine, samples: Iterable[Sample], wanted: int) -> list[Sample]:
    """Looping answers of the target: what it says when it may not end an answer."""
    found: list[Sample] = []
    for sample in samples:
        end = sample.spans[-1][1]
        tokens: list[int] = []
        request = GenerationRequest(
            request_id=f"looping-{len(found)}-{sample.id}",
            prompt_ids=sample.token_ids[:end],
            stopping=StopConditions(max_tokens=LOOPING_TOKENS, ignore_eos=True),
            sampling=GREEDY,
        )
        async for commit in engine.generate(request):
            tokens += commit.token_ids
        if is_looping(tokens):
            name = f"looping-{len(found)}"
            ids = (*sample.token_ids[:end], *tokens)
            found.append(replace(sample, id=name, session=name, token_ids=ids, spans=((end, len(ids)),), looping=True))
            progress(f"{len(found)} of {wanted} looping answers")
        if len(found) == wanted:
            break
    return found


def _offers(
    data: TrafficData,
    looping: Sequence[Sample],
    new: Path,
    old: Path,
    target: FrozenTarget,
    work: Path,
    quick: bool,
) -> Iterable[Offer]:
    learnt = TrainingRecord.of([*data.train, *data.replay, *data.validation])
    deepened(new, work / "slow", finale.DEAD_LAYERS)
    yield Offer("accepts more, drafts cost more than that saves", work / "slow", learnt, data.gate)
    yield Offer("learnt from sessions that judge it", new, learnt | TrainingRecord.of(data.gate), data.gate)
    if quick:
        return
    block = 16
    token = 0
    forgetting = [*data.train, *itertools.islice(misled(data.replay, block, token), len(data.train))]
    yield Offer(
        "better on new traffic, worse on anchors",
        _trained(data, forgetting, 1e-3, old, target, work / "forgetting"),
        TrainingRecord.of(forgetting),
        data.gate,
    )
    half = len(looping) // 2
    repeating = [*unmarked(looping[:half]), *data.replay]
    yield Offer(
        "better only where answers loop",
        _trained(data, repeating, 2e-4, old, target, work / "looping"),
        TrainingRecord.of(repeating),
        [*data.gate, *looping[half:]],
    )


def _trained(
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

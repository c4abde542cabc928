"""What is asked when the traffic is over: was it better, was no answer changed, and is a poisoned candidate refused?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from redraft.engine.checkpoints import resolve
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.loading import bundled
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.server import build_core
from redraft.engine.types import AcceptLength, GenerationRequest, StopConditions
from redraft.feedback.contexts import TurnContext
from redraft.feedback.events import START, Event
from redraft.ops.bench.report import spread
from redraft.ops.demo.results import Judged, Refused
from redraft.ops.demo.story import Story, phase_sessions
from redraft.ops.errors import CliError
from redraft.ops.feedback import open_contexts, open_log
from redraft.retrain.data.sample import Sample
from redraft.retrain.dflash.model import DFlashModel
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.judge import judge
from redraft.retrain.gate.poisoned import deepened
from redraft.retrain.gate.seen import TrainingRecord
from redraft.retrain.replay import DFlashReplay, replay
from redraft.retrain.traffic import TrafficConfig, collect, with_later_gate
from redraft.retrain.trainer import Progress

TENANT = "default"
DEAD_LAYERS = 45
"""As many as make a draft about as dear as the pass that verifies it, several times over."""


def contexts_of(story: Story, sessions: Sequence[str]) -> list[TurnContext]:
    """The tokens of those sessions' answers, but for looping ones."""
    store = open_contexts(story.served.config)
    found = (story.watch.session(name) for name in sessions)
    ids = itertools.chain.from_iterable(served.contexts for served in found if served)
    return [context for id_ in ids if (context := store.get(TENANT, id_))]


def judged(story: Story, old: Path, new: Path, target: FrozenTarget, sessions: int, progress: Progress) -> Judged:
    """Replay the last phase's answers, which nothing was trained on, through both drafters."""
    names = spread(phase_sessions(story.phases, "recovered"), sessions)
    samples = [
        Sample(
            id=f"{number}",
            source="demo",
            family="test",
            split="test",
            session=context.session,
            token_ids=context.token_ids,
            spans=((context.prompt_tokens, len(context.token_ids)),),
            greedy=True,
            looping=False,
        )
        for number, context in enumerate(contexts_of(story, names))
    ]
    length = story.served.config.engine.block_size - 1
    totals = []
    for done, folder in enumerate((old, new)):
        drafting = DFlashReplay(DFlashModel.load(folder, target.target.device), target)
        total = AcceptLength()
        for number, replayed in enumerate(replay(samples, drafting, [length]), 1):
            total += replayed.counts[length].length
            progress(done * len(samples) + number, 2 * len(samples), "replaying unseen requests through both drafters")
        totals.append(total)
    return Judged(sessions=len(names), old=totals[0], new=totals[1])


async def lossless(story: Story, count: int, progress: Progress) -> tuple[int, int]:
    """Have the engine give some answers again without a drafter: how many, and how many differ."""
    contexts = spread([c for phase in story.phases for c in contexts_of(story, phase.sessions)], count)
    engine = EmbeddedEngine(story.served.socket)
    violations = 0
    try:
        for number, context in enumerate(contexts, 1):
            answer = context.token_ids[context.prompt_tokens :]
            request = GenerationRequest(
                request_id=f"again-{number}",
                prompt_ids=context.token_ids[: context.prompt_tokens],
                stopping=StopConditions(max_tokens=len(answer)),
                sampling=context.sampling,
                speculation=False,
            )
            tokens: list[int] = []
            async for commit in engine.generate(request):
                tokens += commit.token_ids
            violations += tuple(tokens) != answer
            progress(number, len(contexts), "answering again without a drafter")
    finally:
        await engine.close()
    return len(contexts), violations


async def offer_poisoned(
    story: Story, old: Path, good: Path, target: FrozenTarget, work: Path, progress: Progress
) -> Refused:
    """Offer the gate the good candidate made slow: it accepts as much and costs more than it saves."""
    poisoned = work / "poisoned"
    await asyncio.to_thread(deepened, good, poisoned, DEAD_LAYERS)
    engine = EmbeddedEngine(story.served.socket)
    try:
        costs = await engine.costs()
    finally:
        await engine.close()
    assert story.signal is not None
    events, store, traffic = _events(story), open_contexts(story.served.config), TrafficConfig(anchor_share=0.4)
    data = collect(events, store, target=story.target, since=story.signal.since, config=traffic)
    data = with_later_gate(data, events, store, traffic)
    report = await asyncio.to_thread(
        judge,
        data.gate,
        data.anchor,
        old=old,
        new=poisoned,
        target=target,
        costs=costs,
        engine=_idle_engine(story),
        seen=TrainingRecord.of([*data.train, *data.replay, *data.validation]),
        block_length=story.served.config.engine.block_size - 1,
        config=GateConfig(min_sessions=2, min_anchor_sessions=2, draws=2000),
        progress=progress,
    )
    return Refused(
        poison=f"the new drafter with {DEAD_LAYERS} layers more that do nothing but take time",
        outcome=report.verdict.outcome,
        rule=report.verdict.rule,
        reason=report.verdict.reason,
    )


def frozen_target(story: Story) -> FrozenTarget:
    return FrozenTarget.load(resolve(story.served.config.engine.model), torch.device("cpu"), torch.bfloat16)


def bundled_folder(story: Story) -> Path:
    folder = bundled(story.target)
    if folder is None:
        raise CliError(f"no drafter is bundled for {story.served.model}; the demo needs one to begin with")
    return folder


def _events(story: Story) -> list[Event]:
    log, cursor = open_log(story.served.config), START
    events: list[Event] = []
    while True:
        more, cursor = log.read(cursor, 1000)
        if not more:
            return events
        events += more


def _idle_engine(story: Story) -> Callable[[Path], EngineCore]:
    """An engine as the deployment's, that serves the drafter in a folder."""

    def make(folder: Path) -> EngineCore:
        config = story.served.config.engine
        return build_core(EngineConfig(model=config.model, drafter=str(folder), block_size=config.block_size))[0]

    return make

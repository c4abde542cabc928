"""What is asked when the traffic is over: was it better, was no answer changed, and is a poisoned candidate refused?"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from redraft.engine.checkpoints import resolve
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.loading import bundled
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.server import build_core
from redraft.engine.types import AcceptLength, Capabilities, GenerationRequest, StopConditions
from redraft.feedback.contexts import TurnContext
from redraft.ops.bench.report import spread
from redraft.ops.demo.results import Judged, Refused
from redraft.ops.demo.story import PhaseName, Story
from redraft.ops.errors import CliError
from redraft.ops.feedback import open_contexts, open_log
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.features import CAPTURE_ROWS, PatientCapture
from redraft.retrain.frozen import FrozenTarget, load_target
from redraft.retrain.gate.judge import judge
from redraft.retrain.gate.poisoned import deepened
from redraft.retrain.gate.seen import TrainingRecord
from redraft.retrain.gate.writing import PAGE
from redraft.retrain.loop import REPORT
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.replay import ModelReplay, replay
from redraft.retrain.traffic import TrafficData, collect, with_later_gate
from redraft.retrain.traffic_config import TrafficConfig
from redraft.retrain.trainer import Progress

TENANT = "default"
DEAD_LAYERS = 20
"""As many as make a draft about twice as dear as the pass that verifies it."""


def answers_of(story: Story, phase: PhaseName) -> dict[str, dict[int, TurnContext]]:
    """The tokens of a phase's answers by session id and turn; sessions with a looping or lost answer are left out."""
    store = open_contexts(story.served.config)
    found: dict[str, dict[int, TurnContext]] = {}
    for each in story.phases:
        for name, id_ in each.sessions.items() if each.name == phase else ():
            asked = [turn.turn for turn in each.turns if turn.session == name and turn.error is None]
            served = story.watch.session(name)
            if served is None or len(served.answers) != len(asked):
                continue
            contexts = [
                store.get(TENANT, answer.context) if answer.context and not answer.looping else None
                for answer in served.answers
            ]
            kept = {turn: context for turn, context in zip(asked, contexts, strict=True) if context is not None}
            if kept and len(kept) == len(asked):
                found[id_] = kept
    return found


def samples_of(answers: Mapping[str, Mapping[int, TurnContext]]) -> list[Sample]:
    """Answers as samples for a replay; those with equal beginnings follow one another."""
    samples = [
        Sample(
            id=f"{session}:{turn}",
            source="demo",
            family=session,
            split="test",
            session=session,
            token_ids=context.token_ids,
            spans=((context.prompt_tokens, len(context.token_ids)),),
            greedy=True,
            looping=False,
        )
        for session, turns in answers.items()
        for turn, context in turns.items()
    ]
    return sorted(samples, key=lambda sample: sample.token_ids)


def judged(story: Story, old: Path, new: Path, target: FrozenTarget, sessions: int, progress: Progress) -> Judged:
    """Replay answers of the last phase, which nothing was trained on, through both drafters."""
    answers = answers_of(story, "recovered")
    samples = samples_of({id_: answers[id_] for id_ in spread(list(answers), sessions)})
    length = story.served.config.engine.block_size - 1
    by_drafter: list[dict[str, AcceptLength]] = []
    for done, folder in enumerate((old, new)):
        drafting = drafting_of(folder, target)
        found: dict[str, AcceptLength] = {}
        for number, replayed in enumerate(replay(samples, drafting, [length]), 1):
            session = replayed.sample.session
            found[session] = found.get(session, AcceptLength()) + replayed.counts[length].length
            progress(done * len(samples) + number, 2 * len(samples), "replaying unseen requests through both drafters")
        by_drafter.append(found)
    under_old, under_new = by_drafter
    names = {id_: name for phase in story.phases if phase.name == "recovered" for name, id_ in phase.sessions.items()}
    return Judged(
        sessions=len(under_old),
        old=sum(under_old.values(), AcceptLength()),
        new=sum(under_new.values(), AcceptLength()),
        old_by_session={names[id_]: length for id_, length in under_old.items()},
    )


def drafting_of(folder: Path, target: FrozenTarget) -> ModelReplay:
    """A drafter's replay, which reads what a sample shares with the one before it only once."""
    device = target.target.device
    model = load_model(folder, device)
    capture = PatientCapture(target.target, model.config.feature_layers, CAPTURE_ROWS[device.type])
    return ModelReplay(model, target, capture)


async def lossless(story: Story, count: int, progress: Progress) -> tuple[int, int]:
    """Have the engine give some answers again without a drafter: how many, and how many differ."""
    phases = dict.fromkeys(phase.name for phase in story.phases)
    answers = (turns for phase in phases for turns in answers_of(story, phase).values())
    contexts = spread([context for turns in answers for context in turns.values()], count)
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
    data = run_data(story, story.served.config.traffic)
    report = await asyncio.to_thread(
        judge,
        data.gate,
        data.anchor,
        old=old,
        new=poisoned,
        target=target,
        costs=costs,
        engine=idle_engine(story),
        seen=TrainingRecord.of([*data.train, *data.replay, *data.validation]),
        block_length=story.served.config.engine.block_size - 1,
        config=story.served.config.gate,
        progress=lambda step, steps, text: progress(step, steps, f"poisoned candidate: {text}"),
    )
    return Refused(
        poison=f"the new drafter with {DEAD_LAYERS} layers more that do nothing but take time",
        outcome=report.verdict.outcome,
        rule=report.verdict.rule,
        reason=report.verdict.reason,
    )


def keep_report(story: Story, folder: Path) -> None:
    """Copy the page that the gate wrote of the run's candidate, and its plots, if it wrote one."""
    for page in story.served.config.retrain.runs.glob(f"*/*/{REPORT}/{PAGE}"):
        shutil.copytree(page.parent, folder, dirs_exist_ok=True)


def run_data(story: Story, traffic: TrafficConfig) -> TrafficData:
    """What the loop's run had to learn from and to judge by, and the sessions since."""
    assert story.signal is not None
    events, store = list(open_log(story.served.config).events()), open_contexts(story.served.config)
    data = collect(events, store, target=story.target, since=story.signal.since, config=traffic)
    return with_later_gate(data, events, store, traffic)


def frozen_target(story: Story) -> FrozenTarget:
    return load_target(resolve(story.served.config.engine.model), TrainConfig(device="cpu"))


def bundled_folder(story: Story) -> Path:
    folder = bundled(story.target)
    if folder is None:
        raise CliError(f"no drafter is bundled for {story.served.model}; the demo needs one to begin with")
    return folder


def idle_engine(story: Story) -> Callable[[Path], tuple[EngineCore, Capabilities]]:
    """An engine as the deployment's, that serves the drafter in a folder."""

    def make(folder: Path) -> tuple[EngineCore, Capabilities]:
        config = story.served.config.engine
        return build_core(EngineConfig(model=config.model, drafter=str(folder), block_size=config.block_size))

    return make

"""The loop's whole story on one machine: traffic drifts, the drafter recovers, and a poisoned one is refused."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from redraft.engine.checkpoints import identity, resolve
from redraft.engine.types import DrafterVersion
from redraft.feedback.drift.monitor import DriftMonitor
from redraft.feedback.drift.signal import DriftSignal
from redraft.ops.demo.deployment import Deployed, deployed
from redraft.ops.demo.scenario import CHANGES, MAX_TOKENS, after, before, evaluation
from redraft.ops.demo.traffic import Client, TurnResult, drive
from redraft.ops.demo.watch import Watch
from redraft.ops.errors import CliError
from redraft.ops.feedback import open_log
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.gate.report import ANCHORS, NEW_TRAFFIC
from redraft.retrain.registry.pointers import FilePointerStore
from redraft.retrain.registry.registry import open_registry
from redraft.retrain.trainer import Progress

T = TypeVar("T")

AGENT = "assistant"
PhaseName = Literal["before", "drift", "training", "recovered", "anchors"]
OUTCOMES = {0: "promoted", 10: "refused", 11: "inconclusive", 12: "too little to learn from"}
"""What `redraft retrain run --once` says by its exit status."""


class Plan(Struct, frozen=True, kw_only=True):
    """How long each part is, in sessions; ``turns`` are the most that a session asks for. On two cores all of it takes
    about so many ``minutes``.

    ``before`` is at least what a reference takes to be learnt, ``drift`` the most to wait for a signal, ``collect``
    what is served from there until training begins, ``judged`` how many sessions of families that nothing is trained on
    show what came of it. ``agents`` think for ``think`` seconds on average between requests; while training runs and
    after it there are ``agents_training``, who think for ``think_training``. ``recipe`` is what training's has
    otherwise than usual, ``settings`` the deployment's.
    """

    minutes: int
    agents: int = 2
    agents_training: int = 1
    turns: int
    max_tokens: int
    think: float = 0.0
    think_training: float
    before: int
    drift: int
    collect: int
    judged: int
    recipe: dict[str, Any]
    settings: dict[str, dict[str, Any]]


FULL = Plan(
    minutes=15,
    turns=3,
    max_tokens=MAX_TOKENS,
    think_training=2.0,
    before=70,
    drift=60,
    collect=70,
    judged=20,
    recipe={"steps": 120, "held_out": 8},
    settings={
        "feedback": {"baseline_share": 1.0},
        "drift": {"learning_sessions": 30, "cooldown_sessions": 1000, "effect_floor": 0.3},
        "traffic": {"anchor_share": 0.4, "gate_share": 0.2, "judging_sessions": 30},
    },
)
FAST = Plan(
    minutes=8,
    turns=1,
    max_tokens=48,
    think_training=2.0,
    before=40,
    drift=100,
    collect=30,
    judged=10,
    recipe={"steps": 50, "sequences": 4, "eval_every": 50, "held_out": 4},
    settings={
        "feedback": {"baseline_share": 1.0},
        "drift": {"learning_sessions": 30, "cooldown_sessions": 1000, "effect_floor": 0.3},
        "traffic": {"anchor_share": 0.3, "sessions": 40, "judging_sessions": 16},
        "gate": {"min_sessions": 8, "min_anchor_sessions": 8, "anchor_margin": 0.15, "parity_sessions": 2},
    },
)
"""Small samples are given a wider margin, so that something can be decided."""


class Phase(Struct, kw_only=True):
    """A stretch of traffic; times since the epoch. ``sessions`` are ids of conversations by the names they had."""

    name: PhaseName
    agents: int
    started: float
    ended: float = 0.0
    sessions: dict[str, str] = {}
    turns: list[TurnResult] = []

    @property
    def failures(self) -> list[TurnResult]:
        return [turn for turn in self.turns if turn.error is not None]

    def tpot(self) -> tuple[float, float] | None:
        """P50 and P95 in milliseconds over its requests."""
        found = [turn.tpot * 1e3 for turn in self.turns if turn.tpot is not None]
        if len(found) < 2:
            return None
        cuts = quantiles(found, n=20, method="inclusive")
        return cuts[9], cuts[18]

    def __add__(self, later: Phase) -> Phase:
        """Both as one stretch."""
        return replace(self, ended=later.ended, sessions=self.sessions | later.sessions, turns=self.turns + later.turns)


class Run(Struct, frozen=True, kw_only=True):
    """One `redraft retrain run --once`; ``said`` is the end of what it printed, ``judged_from`` since the epoch."""

    outcome: str
    seconds: float
    said: str
    judged_from: float | None = None


Tell = Callable[[str], None]
Tick = Callable[[str, int, int, float | None], None]
"""Hears of a phase, the sessions done and wanted, and its accept length so far."""


_COUNT = re.compile(r"(\d+)/(\d+) (.+)")
"""How a run without a terminal tells its progress."""


class Story:
    """Plays the parts in order against one deployment; what happened is in its fields."""

    def __init__(self, served: Deployed, plan: Plan, tell: Tell, tick: Tick, progress: Progress) -> None:
        self.served = served
        self.plan = plan
        self._tell = tell
        self._tick = tick
        self._progress = progress
        self.target = identity(resolve(served.config.engine.model))
        self.registry = open_registry(served.config.retrain.registry, self.target)
        self.pointers = FilePointerStore(served.config.retrain.registry)
        references = (reference for entered in self.registry.all() for reference in entered.references)
        self.watch = Watch(open_log(served.config), DriftMonitor(served.config.drift, references))
        self.phases: list[Phase] = []
        self.signal: DriftSignal | None = None
        self.run: Run | None = None
        self._client = Client(served.url, served.model, AGENT, plan.max_tokens)

    async def close(self) -> None:
        await self._client.close()

    async def play(self) -> None:
        """Serve until a reference is learnt, shift, wait for the signal, retrain under load, and look what came of it.

        Raises `CliError` where the story cannot go on.
        """
        plan = self.plan
        old, new = before(), after()
        self._tell(f"1. The agent as it was: {plan.before} sessions, to learn what accept length to expect")
        await self.serve("before", old, plan.before, until=lambda: False)
        if not self.watch.watching:
            raise CliError(f"no reference was learnt in {plan.before} sessions; see the deployment's own logs")
        new_traffic = iter(new)
        self._tell(f"2. The agent is rewritten: sessions until drift is noticed, {plan.drift} at most")
        await self.serve("drift", new_traffic, plan.drift, until=lambda: self.signal is not None)
        if self.signal is None:
            raise CliError(f"{plan.drift} sessions after the rewrite drift was not detected")
        estimate = self.signal.estimate
        self._tell(
            f"3. Drift is noticed: accept length {estimate.effect:+.0%} over {estimate.sessions} sessions; "
            f"{plan.collect} sessions more are collected, to learn from"
        )
        await self.serve("drift", new_traffic, plan.collect, until=lambda: False)
        self._tell("4. A new drafter is trained on what was collected, while serving goes on")
        training = asyncio.create_task(self._retrain())
        try:
            await self.serve("training", new_traffic, len(new), until=training.done)
            self.run = await training
        finally:
            training.cancel()
            with suppress(asyncio.CancelledError):
                await training
        if self.run.outcome == "promoted":
            self._tell(f"6. The new drafter serves: {plan.judged} sessions of scenarios that nothing was trained on")
            await self.serve("recovered", evaluation(*CHANGES.values()), plan.judged, until=lambda: False)

    def serving(self) -> DrafterVersion | None:
        pointer = self.pointers.load(self.target)
        return pointer.serving if pointer else None

    async def serve(
        self, name: PhaseName, sessions: Iterable[Conversation], most: int, until: Callable[[], bool]
    ) -> None:
        """Send sessions until ``until`` or the most; drift is looked for after each turn."""
        paced = name in ("training", "recovered")
        agents = self.plan.agents_training if paced else self.plan.agents
        phase = Phase(name=name, agents=agents, started=time.time())
        self.phases.append(phase)
        earlier = sum(len(each.sessions) for each in self.phases)
        numbers = itertools.count(earlier)

        def named_sessions() -> Iterator[tuple[str, Conversation]]:
            for session in itertools.islice(sessions, most):
                name = f"{next(numbers):04d}:{session.id.replace('/', ':')}"
                phase.sessions[name] = session.id
                yield name, session

        def report(turn: TurnResult) -> None:
            phase.turns.append(turn)
            if turn.error is not None:
                self._tell(f"a request failed: {turn.error}")
            self._look()
            self._tick(name, len(phase.sessions), most, self.watch.length(phase.sessions).tau)

        await drive(
            self._client,
            named_sessions(),
            concurrency=agents,
            turns=self.plan.turns,
            think=self.plan.think_training if paced else self.plan.think,
            report=report,
            go_on=lambda: not until(),
        )
        await self._written(phase)
        phase.ended = time.time()

    def _look(self) -> None:
        for found in self.watch.poll():
            if self.signal is None and found.direction == "drop":
                self.signal = found

    async def _written(self, phase: Phase) -> None:
        """Wait for the log to hold the phase's last answers."""
        for _ in range(50):
            self._look()
            if all(self.watch.session(turn.session) for turn in phase.turns if turn.error is None):
                return
            await asyncio.sleep(0.1)

    async def _retrain(self) -> Run:
        """The loop's own command, which gives way to serving; it is stopped with this."""
        started = time.monotonic()
        judged_from: float | None = None
        process = await asyncio.create_subprocess_exec(
            *self.served.command("retrain", "run", "--once"),
            env=dict(self.served.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        said: list[str] = []
        try:
            async for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                if count := _COUNT.fullmatch(text):
                    judging = count[3] in (NEW_TRAFFIC, ANCHORS)
                    if judging and judged_from is None:
                        judged_from = time.time()
                        self._tell("5. The gate replays sessions that training never saw through both drafters")
                    self._progress(int(count[1]), int(count[2]), f"{'gate' if judging else 'training'}: {count[3]}")
                elif not text.startswith("The report is "):  # in a folder that ends with the deployment
                    said.append(text)
                    self._tell(text)
            code = await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
                await process.wait()
        if code not in OUTCOMES:
            raise CliError(f"training failed: {said[-1].removeprefix('error: ') if said else f'status {code}'}")
        return Run(
            outcome=OUTCOMES[code],
            seconds=time.monotonic() - started,
            said="\n".join(said[-20:]),
            judged_from=judged_from,
        )


async def play(plan: Plan, tell: Tell, tick: Tick, progress: Progress, then: Callable[[Story], Awaitable[T]]) -> T:
    """Run the story in a deployment that begins and ends with it; ``then`` is called while it still runs."""
    with TemporaryDirectory(prefix="redraft-") as folder:
        tell("A deployment of the demo's own is starting")
        async with deployed(Path(folder), plan.settings, plan.recipe) as served:
            story = Story(served, plan, tell, tick, progress)
            try:
                await story.play()
                return await then(story)
            finally:
                await story.close()

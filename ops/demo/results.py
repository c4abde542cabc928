"""What came of the story, in numbers: as JSON, and for the plot and the summary."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from msgspec import Struct

from redraft.engine.types import AcceptLength
from redraft.ops.demo.story import Phase, Run, Story


class SessionRow(Struct, frozen=True, kw_only=True):
    """One session in the order of traffic; ``tpot_ms`` is the median over its requests."""

    phase: str
    session: str
    time: float
    committed: int
    verify_steps: int
    tpot_ms: float | None
    drafter: str | None


class PhaseRow(Struct, frozen=True, kw_only=True):
    """A phase's sums; times since the epoch, milliseconds a token over its requests, of so many agents at once."""

    name: str
    agents: int
    started: float
    ended: float
    sessions: int
    requests: int
    failed: int
    committed: int
    verify_steps: int
    tau: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None


class Judged(Struct, frozen=True, kw_only=True):
    """The same answers of sessions that nothing was trained on, replayed under the old and the new drafter.

    ``old_by_session`` is by the name that a session had.
    """

    sessions: int
    old: AcceptLength
    new: AcceptLength
    old_by_session: dict[str, AcceptLength] = {}


class Refused(Struct, frozen=True, kw_only=True):
    """What the gate said of the poisoned candidate."""

    poison: str
    outcome: str
    rule: str | None
    reason: str


class Result(Struct, frozen=True, kw_only=True):
    """Times in seconds since the story began, ``began`` since the epoch.

    ``lossless`` are answers given again without a drafter.
    """

    fast: bool
    began: float
    seconds: float
    rewritten_at: float
    detected_at: float
    gate_at: float | None
    swapped_at: float | None
    drift: dict[str, Any]
    run: Run
    old: str
    new: str | None
    phases: list[PhaseRow]
    judged: Judged | None
    poisoned: Refused | None
    lossless_checked: int
    lossless_violations: int
    failed_requests: int
    sessions: list[SessionRow]


def phase_rows(story: Story) -> Iterator[PhaseRow]:
    """Stretches of one name, such as drift before it was noticed and after, are one phase."""
    for _, stretches in itertools.groupby(story.phases, lambda phase: phase.name):
        yield _phase_row(story, functools.reduce(Phase.__add__, stretches))


def _phase_row(story: Story, phase: Phase) -> PhaseRow:
    length = story.watch.length(phase.sessions)
    tpot = phase.tpot()
    return PhaseRow(
        name=phase.name,
        agents=phase.agents,
        started=phase.started,
        ended=phase.ended,
        sessions=len(phase.sessions),
        requests=len(phase.turns),
        failed=len(phase.failures),
        committed=length.committed,
        verify_steps=length.verify_steps,
        tau=length.tau,
        tpot_p50_ms=tpot[0] if tpot else None,
        tpot_p95_ms=tpot[1] if tpot else None,
    )


def session_rows(story: Story) -> Iterator[SessionRow]:
    for phase in story.phases:
        for name in phase.sessions:
            served = story.watch.session(name)
            if served is None:
                continue
            times = [turn.tpot * 1e3 for turn in phase.turns if turn.session == name and turn.tpot is not None]
            yield SessionRow(
                phase=phase.name,
                session=name,
                time=served.time,
                committed=served.length.committed,
                verify_steps=served.length.verify_steps,
                tpot_ms=median(times) if times else None,
                drafter=served.drafters[-1].id if served.drafters else None,
            )


def pooled(rows: Sequence[SessionRow]) -> AcceptLength:
    return AcceptLength(sum(row.committed for row in rows), sum(row.verify_steps for row in rows))

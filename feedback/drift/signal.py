"""What the monitor says: signals, and the state of every chart."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from redraft.engine.types import AcceptLength, DrafterVersion, Stratum
from redraft.feedback.drift.reference import Reference

Direction = Literal["drop", "rise"]
State = Literal["learning", "watching", "drifted", "cooling", "not watched"]
"""``drifted``: signalled, and still past the effect floor; ``cooling``: signalled lately, and back within it."""


class Estimate(Struct, frozen=True):
    """A relative change of accept length over some sessions, with its 95 % interval."""

    effect: float
    low: float
    high: float
    sessions: int

    def __str__(self) -> str:
        return f"{self.effect:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


class DriftSignal(Struct, frozen=True, kw_only=True, tag="drift"):
    """Accept length of a drafter changed in a stratum, or (``stratum`` None) over all of them.

    ``estimate`` is of the sessions ``since`` it began; it is read off the stretch that set the alarm off, so it leans
    away from zero. ``reference`` is what it is a change from; None over all strata, each of which has its own.
    """

    time: float
    since: float
    stratum: Stratum | None
    drafter: DrafterVersion
    direction: Direction
    estimate: Estimate
    reference: Reference | None

    def __str__(self) -> str:
        at = self.stratum
        where = f"{at.tenant}/{at.agent_type}, context ≤ {at.context_bucket}, {at.mode}" if at else "all strata"
        return f"{self.direction} in {where}: {self.estimate} over {self.estimate.sessions} sessions"


class StratumStatus(Struct, frozen=True, kw_only=True):
    """A chart as people and metrics see it; ``stratum`` None is the one over all strata.

    ``learnt`` of ``to_learn`` sessions are in a reference being learnt, ``sessions`` were compared with it.
    ``statistic`` is the height of the side that is nearer to its ``threshold``. ``estimate`` is over the latest
    sessions, or those since the last ``signal``. ``new`` says that the stratum was first seen after others were watched
    already. ``accept_length`` counts every verify step, ``explored_steps`` those that drift is judged by.
    """

    stratum: Stratum | None
    drafter: DrafterVersion
    state: State
    new: bool
    learnt: int
    to_learn: int
    sessions: int
    accept_length: AcceptLength
    explored_steps: int
    reference: Reference | None
    reference_tau: float | None
    estimate: Estimate | None
    direction: Direction
    statistic: float
    threshold: float | None
    since: float | None
    signal: DriftSignal | None
    last_seen: float


class DriftStatus(Struct, frozen=True, kw_only=True):
    """Every chart, and the answers that were not judged: looping, or of a session that two drafter versions served."""

    strata: tuple[StratumStatus, ...]
    looping: int
    two_versions: int

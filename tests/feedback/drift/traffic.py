"""Answers for the monitor: recorded sessions drawn again, and sessions made to measure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from redraft.engine.types import GREEDY, DrafterVersion, Stratum
from redraft.feedback.drift.reference import Counts, Reference, make_reference
from redraft.feedback.events import Origin, StepCounts, TurnEvent, session_hash

DFLASH = DrafterVersion("dflash", "d1")
FEWEST_SESSIONS = 5
HAZARD = (0.55, 0.6, 0.65, 0.7, 0.7, 0.7, 0.7)

Rng = np.random.Generator
Session = tuple[tuple[int, ...], tuple[int, ...]]


def recorded() -> dict[str, list[Session]]:
    """Sessions of ``sessions.json`` by agent type, where there are enough; context buckets are pooled."""
    rows = json.loads(Path(__file__).with_name("sessions.json").read_text())
    by_agent: dict[str, list[Session]] = {}
    for agent, _, reached, accepted, _ in rows:
        by_agent.setdefault(agent, []).append((tuple(reached), tuple(accepted)))
    return {agent: own for agent, own in sorted(by_agent.items()) if len(own) >= FEWEST_SESSIONS}


def thinned(rng: Rng, counts: Session, *, share: float = 1.0, survival: float = 1.0) -> Session:
    """A session of which a ``share`` of the steps was explored, each acceptance kept with probability ``survival``."""
    reached, accepted = counts
    left = int(rng.binomial(reached[0], share))
    made: tuple[list[int], list[int]] = ([], [])
    for k, (r, a) in enumerate(zip(reached, accepted, strict=True)):
        kept = int(rng.binomial(rng.hypergeometric(a, r - a, left), survival)) if left else 0
        made[0].append(left)
        made[1].append(kept)
        following = reached[k + 1] if k + 1 < len(reached) else 0
        left = int(rng.hypergeometric(following, a - following, kept)) if kept else 0
    return tuple(made[0]), tuple(made[1])


def tau(hazard: Sequence[float]) -> float:
    return float(1 + np.cumprod(hazard).sum())


def survival_for(change: float, sessions: Sequence[Session]) -> float:
    """The survival of acceptances that changes tau of the pooled hazards by ``change`` < 0, relative."""
    reached, accepted = (np.sum([counts[side] for counts in sessions], axis=0) for side in (0, 1))
    hazard = accepted / np.maximum(reached, 1)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tau(hazard * middle) < tau(hazard) * (1 + change) else (low, middle)
    return low


def changed(rng: Rng, sessions: Sequence[Session], change: float, *, copies: int = 5) -> list[Session]:
    """Copies of sessions of which tau is lower by ``-change``, relative."""
    survival = survival_for(change, sessions)
    return [thinned(rng, counts, survival=survival) for counts in sessions for _ in range(copies)]


def reference(sessions: Sequence[Counts], at: Stratum | None = None, drafter: DrafterVersion = DFLASH) -> Reference:
    return make_reference(at or stratum(), drafter, sessions)


def drawn(rng: Rng, sessions: Sequence[Session], count: int) -> list[Session]:
    return [sessions[i] for i in rng.integers(0, len(sessions), count)]


def stratum(agent_type: str = "coder", bucket: int = 512) -> Stratum:
    return Stratum("acme", agent_type, bucket, "greedy", False)


def session(
    rng: Rng, hazard: Sequence[float] = HAZARD, *, steps: float = 30.0, turns: int = 1, spread: float = 0.3
) -> list[Session]:
    """Each turn of a session that has a shift of the log odds to itself, of standard deviation ``spread``."""
    own = 1 / (1 + (1 / np.array(hazard) - 1) * np.exp(rng.normal(0.0, spread)))
    made = []
    for _ in range(turns):
        reached = int(rng.geometric(turns / steps))
        counts: tuple[list[int], list[int]] = ([], [])
        for h in own:
            accepted = int(rng.binomial(reached, h))
            counts[0].append(reached)
            counts[1].append(accepted)
            reached = accepted
        made.append((tuple(counts[0]), tuple(counts[1])))
    return made


def pooled(turns: Sequence[Session]) -> Session:
    reached, accepted = (tuple(map(sum, zip(*(turn[side] for turn in turns), strict=True))) for side in (0, 1))
    return reached, accepted


def turn(
    counts: Session,
    session_id: str,
    *,
    time: float = 0.0,
    at: Stratum | None = None,
    drafter: DrafterVersion = DFLASH,
    looping: bool = False,
) -> TurnEvent:
    """The event of an answer whose steps were all explored, in one stratum."""
    at = at or stratum()
    steps = counts[0][0] if counts[0] else 0
    return TurnEvent(
        id=f"{session_id}-{time}",
        time=time,
        origin=Origin(
            tenant=at.tenant,
            agent_type=at.agent_type,
            session=session_hash(at.tenant, session_id),
            request_id="r",
            choice=0,
            target="t",
            tokenizer="t",
            template="t",
        ),
        sampling=GREEDY,
        constrained=False,
        prompt_tokens=10,
        completion_tokens=10,
        looping=looping,
        baseline=False,
        probability=0.1,
        counts=(
            StepCounts(
                drafter=drafter,
                stratum=at,
                committed=steps + sum(counts[1]),
                verify_steps=steps,
                explored_steps=steps,
                reached=tuple(counts[0]),
                accepted=tuple(counts[1]),
            ),
        ),
        context=None,
    )


class Traffic:
    """A stream of answers of a mix of strata; sessions are drawn from each stratum's."""

    def __init__(self, rng: Rng, strata: dict[Stratum, list[Session]], mix: Sequence[float] | None = None) -> None:
        self._rng = rng
        self._events = [[turn(counts, "s", at=at) for counts in sessions] for at, sessions in strata.items()]
        self._mix = mix

    def __call__(self, count: int, mix: Sequence[float] | None = None) -> list[TurnEvent]:
        chosen = self._rng.choice(len(self._events), count, p=mix or self._mix)
        found = []
        for number, which in enumerate(chosen):
            event = self._events[which][self._rng.integers(len(self._events[which]))]
            session = f"{self._rng.integers(1 << 62):x}"
            origin = msgspec.structs.replace(event.origin, session=session)
            found.append(msgspec.structs.replace(event, origin=origin, time=float(number)))
        return found

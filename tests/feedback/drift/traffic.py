"""Simulated answers: sessions that differ as recorded ones do, and drafters that get worse or better."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from redraft.engine.types import GREEDY, DrafterVersion, Stratum
from redraft.feedback.drift.reference import Counts
from redraft.feedback.events import Origin, StepCounts, TurnEvent, session_hash

DFLASH = DrafterVersion("dflash", "d1")
HAZARD = np.array([0.55, 0.6, 0.65, 0.7, 0.7, 0.7, 0.7])


def stratum(agent_type: str = "coder", bucket: int = 512) -> Stratum:
    return Stratum("acme", agent_type, bucket, "greedy", False)


def tau(hazard: np.ndarray) -> float:
    return float(1 + np.cumprod(hazard).sum())


def scaled(hazard: np.ndarray, change: float) -> np.ndarray:
    """Hazards of which the odds are moved by one factor so that tau changes by ``change``, relative."""
    odds = hazard / (1 - hazard)
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        moved = odds * np.exp(middle)
        low, high = (middle, high) if tau(moved / (1 + moved)) < tau(hazard) * (1 + change) else (low, middle)
    moved = odds * np.exp(low)
    return moved / (1 + moved)


def session(
    rng: np.random.Generator, hazard: np.ndarray, *, steps: float = 30.0, turns: int = 1, spread: float = 0.6
) -> list[Counts]:
    """Counts of each turn; ``spread`` is the standard deviation of a session's own shift of the log odds.

    A mean shift of the logits lowers the mean of the hazards a little; references are made of the same sessions.
    """
    odds = hazard / (1 - hazard) * np.exp(rng.normal(0.0, spread))
    own = odds / (1 + odds)
    made = []
    for _ in range(turns):
        reached = int(rng.geometric(turns / steps))
        counts: tuple[list[int], list[int]] = ([], [])
        for h in own:
            accepted = int(rng.binomial(reached, h))
            counts[0].append(reached)
            counts[1].append(accepted)
            reached = accepted
        made.append(counts)
    return made


def turn(
    counts: Counts,
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


def stream(
    rng: np.random.Generator, hazard: np.ndarray, sessions: int, *, name: str, at: Stratum | None = None
) -> Iterator[TurnEvent]:
    for number in range(sessions):
        (counts,) = session(rng, hazard)
        yield turn(counts, f"{name}-{number}", time=float(number), at=at)

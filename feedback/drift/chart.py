"""A two-sided walk over sessions, and the sessions that made it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import Struct, field

from redraft.feedback.drift.cusum import Side
from redraft.feedback.drift.signal import Direction, DriftSignal, Estimate

MIN_SESSIONS = 20
"""Fewest sessions behind a reference, and behind a signal."""

RECENT_SESSIONS = 1_000
STATUS_SESSIONS = 200
_RESAMPLES = 500


class Contribution(Struct):
    """A session's residual and exposure so far; ``last`` is the chart's count of turns when it last grew."""

    last: int
    residual: float
    exposure: float


class Chart(Struct):
    """Both sides, and up to `RECENT_SESSIONS` sessions in the order of their last turns."""

    drop: Side = field(default_factory=Side)
    rise: Side = field(default_factory=Side)
    turns: int = 0
    sessions: int = 0
    exposure: float = 0.0
    quiet_until: int = 0
    signal_turn: int = 0
    recent: dict[str, Contribution] = field(default_factory=dict)
    signal: DriftSignal | None = None

    def add(self, session: str, residual: float, exposure: float, drop: float, rise: float, time: float) -> None:
        """Enter a turn; ``drop`` and ``rise`` are its increments."""
        self.turns += 1
        contribution = self.recent.pop(session, None)
        if contribution is None:
            self.sessions += 1
            contribution = Contribution(0, 0.0, 0.0)
            if len(self.recent) >= RECENT_SESSIONS:
                del self.recent[next(iter(self.recent))]
        self.exposure += exposure
        contribution.last = self.turns
        contribution.residual += residual
        contribution.exposure += exposure
        self.recent[session] = contribution
        self.drop.add(drop, self.turns, time)
        self.rise.add(rise, self.turns, time)

    def alarm(self, threshold: float, floor: float, error: float) -> tuple[Direction, Side, Estimate] | None:
        """The side that crossed; none in cool-down, by too few sessions, or with less than the floor."""
        if self.sessions < self.quiet_until or max(self.drop.height, self.rise.height) < threshold:
            return None
        direction, side = self.leading
        since = [s for s in self.recent.values() if s.last >= side.start]
        if len(since) < MIN_SESSIONS:
            return None
        effect = sum(s.residual for s in since) / sum(s.exposure for s in since)
        if (effect if direction == "rise" else -effect) < floor:
            return None
        return direction, side, estimate(since, error)

    @property
    def leading(self) -> tuple[Direction, Side]:
        return ("drop", self.drop) if self.drop.height >= self.rise.height else ("rise", self.rise)

    def cool(self, signal: DriftSignal, sessions: int) -> None:
        """Begin again, and give no signal for some sessions."""
        self.signal = signal
        self.quiet_until = self.sessions + sessions
        self.drop, self.rise = Side(), Side()
        self.signal_turn = self.turns

    def latest(self, error: float) -> Estimate | None:
        """Of the latest sessions, or those since the signal if they are enough to say."""
        since = list(self.recent.values())[-STATUS_SESSIONS:]
        if self.signal is not None:
            since = [s for s in since if s.last > self.signal_turn]
        return estimate(since, error) if len(since) >= MIN_SESSIONS else None


def estimate(sessions: Sequence[Contribution], error: float) -> Estimate:
    """Pooled over sessions; the interval is a bootstrap by session, with the reference's standard error on top.

    >>> estimate([Contribution(0, -1.0, 10.0)] * 50, 0.0)
    Estimate(effect=-0.1, low=-0.1, high=-0.1, sessions=50)
    """
    rng = random.Random(0)  # noqa: S311
    draws = sorted(_pooled(rng.choices(sessions, k=len(sessions))) + rng.gauss(0.0, error) for _ in range(_RESAMPLES))
    cut = round(0.025 * _RESAMPLES)
    return Estimate(_pooled(sessions), draws[cut], draws[-1 - cut], len(sessions))


def _pooled(sessions: Sequence[Contribution]) -> float:
    return sum(s.residual for s in sessions) / sum(s.exposure for s in sessions)

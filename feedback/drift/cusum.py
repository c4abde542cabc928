"""A two-sided CUSUM on session residuals, and the threshold that gives it its average run length.

Each side adds theta / sigma * (± residual - floor * exposure): sessions weigh by their verify steps, and a change of
less than the floor drifts back to zero. theta is Lundberg's exponent of a session's increment, from its cumulants, so
that E exp(increment) = 1 while nothing is wrong and thresholds mean the same in every stratum and any mix of them.
The run length to threshold is Siegmund's (1985) corrected diffusion approximation, averaged over what a reference
made of finitely many sessions may be wrong by: its level, and its variance.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from msgspec import Struct

from redraft.feedback.drift.reference import Reference

OVERSHOOT = 1.166
"""2 * 0.583, Siegmund's correction for what a normal walk overshoots a boundary by, in standard deviations."""

_ERRORS = tuple(NormalDist().inv_cdf((2 * i + 1) / 30) for i in range(15))


class Scale(Struct, frozen=True):
    """What turns residuals of a stratum into increments; one a side, for residuals are skewed.

    ``deviation`` is the standard deviation of a session's residual, ``drift`` the floor in units of it, and
    ``evidence`` how many such sessions the reference's level is worth.
    """

    drop: float
    rise: float
    deviation: float
    drift: float
    evidence: float

    @classmethod
    def of(cls, reference: Reference, floor: float, exposure: float) -> Scale:
        """Of sessions with so many exploration steps on average."""
        cv = reference.cv_at(exposure)
        drift, deviation = floor / cv, cv * exposure
        drop, rise = (_exponent(drift, sign * reference.skewness, reference.kurtosis) / deviation for sign in (-1, 1))
        return cls(drop, rise, deviation, drift, reference.sessions * (cv / reference.cv) ** 2)

    def increments(self, residual: float, exposure: float, floor: float) -> tuple[float, float]:
        """What a turn adds to the drop side and to the rise side."""
        return self.drop * (-residual - floor * exposure), self.rise * (residual - floor * exposure)


def _exponent(drift: float, skewness: float, kurtosis: float) -> float:
    """Positive root of the cumulant generating function of a unit-variance increment with mean -drift.

    Only skewness and kurtosis that make it smaller than a normal one's (2 drift) are believed.
    """
    third, fourth = max(0.0, skewness), max(0.0, kurtosis - 3)
    low, high = 0.0, 2 * drift
    for _ in range(40):
        middle = (low + high) / 2
        if middle / 2 + third * middle**2 / 6 + fourth * middle**3 / 24 < drift:
            low = middle
        else:
            high = middle
    return high


def threshold(drift: float, run_length: float, evidence: float, kurtosis: float) -> float:
    """Height at which one side alarms once in ``run_length`` sessions, the reference being worth ``evidence`` sessions.

    >>> [round(threshold(0.15, run_length, 10**9, 3), 1) for run_length in (1e3, 1e5)]
    [3.6, 8.1]
    >>> threshold(0.15, 1e5, 200, 3) > threshold(0.15, 1e5, 2000, 3) > 8.1
    True
    """
    spread = math.sqrt(max(kurtosis - 1, 2.0) / evidence)
    slopes = [2 * (drift + error / math.sqrt(evidence)) for error in _ERRORS]
    cases = [(slope, math.exp(spread * error)) for slope in slopes for error in _ERRORS]
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        boundary = middle / (2 * drift) + OVERSHOOT
        rate = sum(variance / _run_length(slope / variance, boundary) for slope, variance in cases) / len(cases)
        if rate * run_length > 1:
            low = middle
        else:
            high = middle
    return high


def _run_length(slope: float, boundary: float) -> float:
    """Siegmund's, of a unit-variance walk with drift -slope / 2."""
    x = slope * boundary
    if abs(x) < 1e-4:
        return boundary**2
    return 2 * (math.exp(min(x, 600.0)) - 1 - x) / slope**2


class Side(Struct):
    """One direction: its height, and when and at which turn it last stood at zero."""

    height: float = 0.0
    since: float = 0.0
    start: int = 0

    def add(self, increment: float, turn: int, time: float) -> None:
        if self.height == 0.0:
            self.since, self.start = time, turn
        self.height = max(0.0, self.height + increment)

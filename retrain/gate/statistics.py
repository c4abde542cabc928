"""Bounds of pooled gains by a paired bootstrap over sessions.

A session is a pair of sums, one a drafter. Whole sessions are drawn with replacement, summed, and only then divided,
so that ratios are pooled, both drafters meet the same sessions, and answers of one session stay together.
"""

from __future__ import annotations

from math import ceil
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Array = npt.NDArray[np.float64]

POWER = 0.8

LEAST_ERROR = 0.5
"""Share of the sample's standard error below which no draw's is believed: it missed the one session that differs."""

NORMAL = NormalDist()


class Bounds(Struct, frozen=True):
    """An estimate with one-sided bounds, each holding with probability ``level``."""

    estimate: float
    lower: float
    upper: float
    level: float
    standard_error: float
    sessions: int


def level_of(alpha: float, look: int) -> float:
    """Confidence of the ``look``-th test of a series, from 1, all of which together err with probability ``alpha``.

    The k-th spends alpha / (k (k + 1)), which sums to alpha however many there will be.

    >>> [round(level_of(0.05, look), 4) for look in (1, 2, 3)]
    [0.975, 0.9917, 0.9958]
    """
    return 1 - alpha / (look * (look + 1))


def bounds(pairs: Array, *, level: float, draws: int, seed: int) -> Bounds:
    """Bounds of the gain sum(first) / sum(second) - 1; pairs [sessions, 2], of two sessions at least."""
    estimate, error = _gain(_moments(pairs).sum(0), len(pairs))
    lower, upper = np.quantile(distribution(pairs, draws=draws, seed=seed), (1 - level, level))
    return Bounds(float(estimate), float(lower), float(upper), level, float(error), len(pairs))


def distribution(pairs: Array, *, draws: int, seed: int) -> Array:
    """What the gain may be, [draws]: its quantiles are the bootstrap-t bounds, second-order accurate on either side.

    A few sessions of very unequal length make plain percentiles too narrow; dividing each draw's error by that draw's
    own standard error mends it. Source: Efron & Tibshirani, An Introduction to the Bootstrap, 12.5.
    """
    sessions = len(pairs)
    moments = _moments(pairs)
    estimate, error = _gain(moments.sum(0), sessions)
    times = np.random.default_rng(seed).multinomial(sessions, np.full(sessions, 1 / sessions), size=draws)
    drawn, errors = _gain(times @ moments, sessions)
    least = max(LEAST_ERROR * float(error), 1e-12)
    possible: Array = estimate - (drawn - estimate) * error / np.maximum(errors, least)
    return possible


def sessions_needed(found: Bounds, threshold: float) -> int | None:
    """Sessions that would put a bound on the estimate's side of ``threshold``, with probability 0.8.

    None if the estimate is on the threshold, so that no number would.
    """
    distance = abs(found.estimate - threshold)
    if distance == 0:
        return None
    wanted = NORMAL.inv_cdf(found.level) + NORMAL.inv_cdf(POWER)
    return ceil(found.sessions * (wanted * found.standard_error / distance) ** 2)


def _moments(pairs: Array) -> Array:
    """What estimate and standard error are made of, session by session."""
    a, b = pairs.T
    return np.stack((a, b, a * a, a * b, b * b), axis=1)


def _gain(sums: Array, sessions: int) -> tuple[Array, Array]:
    """Gain and its linearised standard error, from summed moments [..., 5]."""
    a, b, aa, ab, bb = np.moveaxis(sums, -1, 0)
    ratio = a / b
    squares = np.maximum(aa - 2 * ratio * ab + ratio * ratio * bb, 0)
    return ratio - 1, np.sqrt(squares * sessions / (sessions - 1)) / b

from __future__ import annotations

import numpy as np
import pytest

from redraft.retrain.gate.statistics import Array, Bounds, bounds, distribution, level_of, sessions_needed

pytestmark = pytest.mark.unit


def traffic(generator: np.random.Generator, sessions: int, gain: float, spread: float = 0.1) -> Array:
    """Sessions of unequal length, each with a gain of its own; the pooled one is ``gain``."""
    new = generator.lognormal(0, 0.5, sessions) * 1000
    own = np.exp(generator.normal(0, spread, sessions) - spread**2 / 2)
    return np.stack([new * (1 + gain) * own, new], axis=1)


@pytest.mark.parametrize(("sessions", "gain"), [(20, 0.0), (40, 0.1)])
def test_each_bound_holds_as_often_as_it_says(sessions: int, gain: float) -> None:
    generator = np.random.default_rng(3)
    trials = 400
    found = [bounds(traffic(generator, sessions, gain), level=0.95, draws=1000, seed=trial) for trial in range(trials)]
    for held in (sum(each.lower <= gain for each in found), sum(each.upper >= gain for each in found)):
        assert 0.92 <= held / trials <= 0.98, held


def test_a_series_of_looks_at_nothing_errs_less_often_than_alpha() -> None:
    """A candidate that is no better, judged again and again on growing traffic until it passes."""
    generator = np.random.default_rng(5)
    trials, passed, unpaid = 120, 0, 0
    for trial in range(trials):
        pairs = traffic(generator, 60, 0.0)
        looks = [bounds(pairs[: 15 * k], level=level_of(0.05, k), draws=500, seed=trial) for k in (1, 2, 3, 4)]
        passed += any(each.lower > 0 for each in looks)
        unpaid += any(bounds(pairs[: 15 * k], level=0.95, draws=500, seed=trial).lower > 0 for k in (1, 2, 3, 4))
    assert passed / trials <= 0.07
    assert unpaid / trials > 0.08, "if this is rare anyway, nothing was paid for"


def test_alpha_is_spent_once_however_many_looks_there_are() -> None:
    assert sum(1 - level_of(0.05, look) for look in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)


def test_ratios_are_pooled_sum_over_sum() -> None:
    pairs = np.array([[100.0, 50.0], [10.0, 20.0], [10.0, 20.0]])
    assert bounds(pairs, level=0.95, draws=1000, seed=0).estimate == pytest.approx(120 / 90 - 1)


def test_bounds_are_quantiles_of_what_is_plotted_and_follow_the_seed() -> None:
    pairs = traffic(np.random.default_rng(0), 30, 0.1)
    found = bounds(pairs, level=0.9, draws=2000, seed=4)
    drawn = distribution(pairs, draws=2000, seed=4)
    assert (found.lower, found.upper) == tuple(np.quantile(drawn, (1 - 0.9, 0.9)))
    assert found == bounds(pairs, level=0.9, draws=2000, seed=4)
    assert found != bounds(pairs, level=0.9, draws=2000, seed=5)


def test_sessions_that_all_agree_leave_no_doubt() -> None:
    found = bounds(np.array([[3.0, 2.0]] * 12), level=0.975, draws=1000, seed=0)
    assert found.lower == pytest.approx(0.5)
    assert found.upper == pytest.approx(0.5)


def test_one_session_that_differs_widens_bounds_but_not_without_end() -> None:
    pairs = np.array([[1100.0 + index, 1000.0] for index in range(19)] + [[900.0, 1000.0]])
    found = bounds(pairs, level=0.975, draws=2000, seed=0)
    assert found.lower < 0.09 - 1.96 * found.standard_error + 0.01
    assert found.upper - found.lower < 12 * found.standard_error


def test_as_many_sessions_as_are_said_to_be_needed_do_decide() -> None:
    generator = np.random.default_rng(1)
    pairs = traffic(generator, 400, 0.05)
    pilot = bounds(pairs, level=0.975, draws=1000, seed=0)
    known = Bounds(0.05, 0.0, 0.0, 0.975, pilot.standard_error, pilot.sessions)
    needed = sessions_needed(known, 0.0)
    assert needed is not None
    trials = 150
    decided = sum(
        bounds(traffic(generator, needed, 0.05), level=0.975, draws=500, seed=t).lower > 0 for t in range(trials)
    )
    assert 0.65 <= decided / trials <= 0.92
    assert sessions_needed(known, 0.05) is None

"""Residuals are the relative change of accept length and add up; a reference knows how far chance carries them."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.feedback.drift.reference import Profile

from .traffic import HAZARD, changed, drawn, pooled, recorded, reference, session, tau, thinned

pytestmark = pytest.mark.unit


def exact(hazard: tuple[float, ...], steps: int = 10**6) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts of steps that accept just as often as the hazards say."""
    reached, accepted = [steps], []
    for h in hazard:
        accepted.append(round(reached[-1] * h))
        reached.append(accepted[-1])
    return tuple(reached[:-1]), tuple(accepted)


@pytest.mark.parametrize("factor", [0.5, 0.8, 0.95, 1.0, 1.1, 1.3])
def test_residuals_over_steps_are_the_relative_change_of_tau_however_large(factor: float) -> None:
    profile = Profile.of(*exact(HAZARD))
    now = tuple(h * factor for h in HAZARD)
    reached, accepted = exact(now)
    assert profile.residual(reached, accepted) / reached[0] == pytest.approx(tau(now) / tau(HAZARD) - 1, abs=1e-5)


def test_residuals_add_up_over_turns() -> None:
    profile = Profile.of(*exact(HAZARD))
    turns = session(np.random.default_rng(0), turns=8)
    assert sum(profile.residual(*turn) for turn in turns) == pytest.approx(profile.residual(*pooled(turns)))


def test_answers_that_end_inside_a_block_do_not_look_like_rejections() -> None:
    """Censoring at the rate of the reference leaves both the zero and a change as they are."""

    def censored(hazard: tuple[float, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        reached, accepted, left = [], [], 10.0**6
        for h in hazard:
            reached.append(round(left))
            accepted.append(round(left * h))
            left *= h * 0.9
        return tuple(reached), tuple(accepted)

    profile = Profile.of(*censored(HAZARD))
    assert profile.tau == pytest.approx(tau(HAZARD), rel=1e-5)
    now = tuple(h * 0.9 for h in HAZARD)
    reached, accepted = censored(now)
    assert profile.residual(reached, accepted) / reached[0] == pytest.approx(tau(now) / tau(HAZARD) - 1, rel=1e-4)


def test_positions_that_the_reference_never_reached_or_the_block_has_no_more_are_left_out() -> None:
    profile = Profile.of((100, 50, 0), (50, 0, 0))
    assert profile.residual((100, 50, 7, 7), (50, 0, 7, 7)) == pytest.approx(0)
    assert Profile.of(*exact(HAZARD)).residual((1000,), (550,)) == pytest.approx(0)


def test_a_reference_pools_sessions_and_says_how_much_they_differ() -> None:
    rng = np.random.default_rng(0)
    sessions = [session(rng)[0] for _ in range(3000)]
    made = reference(sessions)
    assert made.reached == pooled(sessions)[0]
    profile = Profile.of(made.reached, made.accepted)
    assert sum(profile.residual(*counts) for counts in sessions) == pytest.approx(0, abs=1e-6)
    means = [
        sum(profile.residual(*counts) for counts in part) / sum(counts[0][0] for counts in part)
        for part in (drawn(rng, sessions, 100) for _ in range(400))
    ]
    assert np.std(means) * 10 == pytest.approx(made.cv, rel=0.1)


def test_a_reference_foretells_the_spread_of_sessions_explored_less() -> None:
    rng = np.random.default_rng(0)
    sessions = [session(rng, steps=200)[0] for _ in range(3000)]
    few = reference([thinned(rng, counts, share=0.1) for counts in sessions])
    assert reference(sessions).cv_at(few.exposure) == pytest.approx(few.cv, rel=0.1)
    assert few.cv > 1.1 * reference(sessions).cv


def test_alike_sessions_are_not_taken_to_be_certain() -> None:
    assert reference([((10, 10), (10, 10))] * 100).cv > 0


@pytest.mark.parametrize("sessions", [[], [((10,), (5,))], [((10,), (5,)), ((), ()), ((0,), (0,))]])
def test_a_reference_of_less_than_two_sessions_is_refused(
    sessions: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    with pytest.raises(ValueError, match="two sessions"):
        reference(sessions)


def test_the_thinned_sessions_of_these_tests_have_the_change_they_say() -> None:
    rng = np.random.default_rng(0)
    for agent, sessions in recorded().items():
        before = Profile.of(*pooled(sessions)).tau
        after = Profile.of(*pooled(changed(rng, sessions, -0.1, copies=30))).tau
        assert after / before - 1 == pytest.approx(-0.1, abs=0.04), agent

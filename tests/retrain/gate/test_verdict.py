from __future__ import annotations

from typing import Any

import pytest

from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.statistics import Bounds
from redraft.retrain.gate.verdict import Evidence, decide

pytestmark = pytest.mark.unit

CONFIG = GateConfig(anchor_margin=0.05)


def bounds(lower: float, upper: float, sessions: int = 40) -> Bounds:
    return Bounds((lower + upper) / 2, lower, upper, 0.975, (upper - lower) / 4, sessions)


def evidence(**changes: Any) -> Evidence:
    good: dict[str, Any] = {
        "sessions": 40,
        "anchor_sessions": 40,
        "gain": bounds(0.05, 0.15),
        "tau_gain": bounds(0.05, 0.15),
        "anchor_gain": bounds(-0.02, 0.02),
    }
    return Evidence(**(good | changes))


BETTER, UNCLEAR, NO_BETTER = bounds(0.02, 0.10), bounds(-0.02, 0.06), bounds(-0.08, 0.0)
KEPT, UNSURE, LOST = bounds(-0.04, 0.02), bounds(-0.08, -0.02), bounds(-0.12, -0.06)


@pytest.mark.parametrize(
    ("gain", "anchors", "outcome", "rules"),
    [
        (BETTER, KEPT, "accepted", ()),
        (BETTER, UNSURE, "inconclusive", ("undecided",)),
        (BETTER, LOST, "refused", ("anchors_lost",)),
        (UNCLEAR, KEPT, "inconclusive", ("undecided",)),
        (UNCLEAR, UNSURE, "inconclusive", ("undecided",)),
        (UNCLEAR, LOST, "refused", ("anchors_lost",)),
        (NO_BETTER, KEPT, "refused", ("not_better",)),
        (NO_BETTER, UNSURE, "refused", ("not_better",)),
        (NO_BETTER, LOST, "refused", ("anchors_lost", "not_better")),
    ],
)
def test_both_tests_must_be_passed_and_either_refuses(
    gain: Bounds, anchors: Bounds, outcome: str, rules: tuple[str, ...]
) -> None:
    verdict = decide(evidence(gain=gain, tau_gain=UNCLEAR, anchor_gain=anchors), CONFIG)
    assert (verdict.outcome, verdict.rules) == (outcome, rules)
    assert verdict.rule == (rules[0] if rules else None)


def test_a_loss_of_just_the_margin_is_not_shown_to_be_under_it() -> None:
    at_margin = decide(evidence(anchor_gain=bounds(-0.05, 0.01)), CONFIG)
    assert at_margin.outcome == "inconclusive"
    assert decide(evidence(anchor_gain=bounds(-0.0499, 0.01)), CONFIG).outcome == "accepted"


def test_a_gain_that_rounds_to_nothing_is_not_shown() -> None:
    assert decide(evidence(gain=bounds(0.0004, 0.0004)), CONFIG).rule == "undecided"
    assert decide(evidence(gain=bounds(0.001, 0.001)), CONFIG).outcome == "accepted"


def test_more_accepted_tokens_that_cost_more_than_they_save_are_slower() -> None:
    verdict = decide(evidence(gain=NO_BETTER, tau_gain=BETTER, anchor_gain=LOST), CONFIG)
    assert verdict.rules == ("slower", "anchors_lost", "not_better")
    assert "accept length on new traffic rises by +6.0 %" in verdict.reason


@pytest.mark.parametrize("gain", [UNCLEAR, NO_BETTER])
def test_what_gains_only_where_answers_loop_is_refused_by_that(gain: Bounds) -> None:
    looping = bounds(0.3, 0.6, sessions=8)
    assert decide(evidence(gain=gain, tau_gain=gain, looping_gain=looping), CONFIG).rule == "looping_only"


def test_a_few_looping_answers_refuse_nobody() -> None:
    looping = bounds(0.3, 0.6, sessions=4)
    assert decide(evidence(gain=UNCLEAR, tau_gain=UNCLEAR, looping_gain=looping), CONFIG).rule == "undecided"


def test_looping_answers_that_gain_too_do_not_hold_up_what_gains_elsewhere() -> None:
    assert decide(evidence(looping_gain=bounds(0.3, 0.6, sessions=8)), CONFIG).outcome == "accepted"


@pytest.mark.parametrize(("sessions", "anchors", "missing"), [(19, 40, (1, 0)), (40, 5, (0, 15)), (0, 0, (20, 20))])
def test_thin_evidence_decides_nothing_however_clear_it_looks(
    sessions: int, anchors: int, missing: tuple[int, int]
) -> None:
    for gain in (BETTER, NO_BETTER):
        verdict = decide(evidence(sessions=sessions, anchor_sessions=anchors, gain=gain), CONFIG)
        assert (verdict.outcome, verdict.rule) == ("inconclusive", "thin")
        assert (verdict.more_sessions, verdict.more_anchor_sessions) == missing


def test_facts_refuse_whatever_the_numbers_say_and_however_few() -> None:
    assert decide(evidence(leaked="training saw it", parity="no", sessions=1), CONFIG).rules == ("leaked",)
    assert decide(evidence(parity="no", sessions=1), CONFIG).rules == ("parity",)


def test_nothing_is_accepted_on_a_replay_that_could_not_be_compared_with_the_engine() -> None:
    verdict = decide(evidence(parity_checked=False), CONFIG)
    assert (verdict.outcome, verdict.rule) == ("inconclusive", "parity")
    assert decide(evidence(parity_checked=False, gain=NO_BETTER), CONFIG).outcome == "refused"


def test_an_open_verdict_says_how_many_sessions_more_would_close_it() -> None:
    verdict = decide(evidence(gain=bounds(-0.02, 0.06), anchor_gain=bounds(-0.055, -0.005)), CONFIG)
    assert verdict.more_sessions == 291  # 40 * ((1.96 + 0.84) * error / (gain - LEAST_GAIN)) ** 2 - 40
    assert verdict.more_anchor_sessions
    nearer = decide(evidence(gain=bounds(-0.01, 0.07)), CONFIG)
    assert nearer.more_sessions
    assert verdict.more_sessions > nearer.more_sessions
    assert nearer.more_anchor_sessions == 0

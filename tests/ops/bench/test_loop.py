"""The loop's benchmark: what its shares and bounds are of, without running any of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from redraft.engine.types import GREEDY, AcceptLength
from redraft.feedback.contexts import TurnContext
from redraft.ops.bench.loop import Judged, _loss, _offline, _share, recovery_shares
from redraft.ops.bench.loop_offline import Accepted, Offline, digest, key

pytestmark = pytest.mark.unit


def judged(old: int, new: int, offline: int) -> Judged:
    return Judged(*(AcceptLength(tokens, 100) for tokens in (old, new, offline)))


def test_recovery_is_the_share_of_the_offline_gain_in_pooled_accept_length() -> None:
    assert _share([judged(200, 350, 400)]) == pytest.approx(0.75)
    long, short = judged(200, 300, 400), Judged(AcceptLength(2, 1), AcceptLength(4, 1), AcceptLength(4, 1))
    assert _share([long, short]) == pytest.approx(0.5, abs=0.01), "sessions weigh by their steps"


def test_the_bound_narrows_with_agreement_and_is_the_same_every_time() -> None:
    alike = [judged(200, 350, 400)] * 10
    mixed = [judged(200, 400, 400), judged(200, 300, 400)] * 5
    assert np.ptp(recovery_shares(alike)) == pytest.approx(0)
    assert np.ptp(recovery_shares(mixed)) > 0.1
    assert (recovery_shares(mixed) == recovery_shares(mixed)).all()


def test_no_gain_offline_is_no_share_at_all() -> None:
    assert math.isnan(_share([judged(400, 400, 400)]))


def test_anchor_loss_is_positive_where_accept_length_fell() -> None:
    assert _loss(np.array([400.0, 100.0, 360.0, 100.0])) == pytest.approx(0.1)


def context(tokens: tuple[int, ...]) -> TurnContext:
    return TurnContext(
        tenant="default", session="s", time=0, target="t", token_ids=(1, 2, *tokens), prompt_tokens=2, sampling=GREEDY
    )


def test_the_offline_drafter_is_compared_only_on_the_very_answers_it_was_measured_on() -> None:
    accepted = {
        key("a", 1): Accepted(digest((7, 8)), 2, 1),
        key("a", 3): Accepted(digest((9,)), 1, 1),
        key("b", 1): Accepted(digest((7, 8)), 2, 1),
    }
    offline = Offline(
        target="t", weights="w", command="train", commit=None, sessions=1, samples=1, blocks=1, answers=accepted
    )
    answers = {
        "a": {1: context((7, 8)), 3: context((9,))},
        "b": {1: context((7, 9))},
        "c": {1: context((7, 8))},
    }
    assert _offline(answers, offline) == {"a": AcceptLength(3, 2)}
    assert _offline(answers, None) == {}

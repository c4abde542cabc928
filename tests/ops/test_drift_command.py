"""The drift table says what there is, and nothing where there is nothing."""

from __future__ import annotations

import pytest

from redraft.engine.types import AcceptLength, DrafterVersion, Stratum
from redraft.feedback.drift.signal import StratumStatus
from redraft.ops.commands.drift import _row

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("sessions", "shown"), [(0, "-"), (12, "12")])
def test_a_stratum_that_was_compared_with_nothing_yet_shows_no_number_of_sessions(sessions: int, shown: str) -> None:
    status = StratumStatus(
        stratum=Stratum("default", "agent", 512, "greedy", False),
        drafter=DrafterVersion("dflash", "0123456789ab"),
        state="learning",
        new=False,
        learnt=7,
        to_learn=200,
        sessions=sessions,
        accept_length=AcceptLength(16, 5),
        explored_steps=5,
        reference=None,
        reference_tau=None,
        estimate=None,
        direction="drop",
        statistic=0.0,
        threshold=None,
        since=None,
        signal=None,
        last_seen=0.0,
    )
    assert _row(status)[5:8] == (shown, "3.20 (16/5)", "-")

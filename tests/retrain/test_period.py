"""New traffic is what came since the drop began, however often the drop was signalled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from redraft.engine.types import DrafterVersion
from redraft.feedback.drift.config import DriftConfig
from redraft.feedback.drift.signal import Direction, DriftSignal, Estimate
from redraft.feedback.events import TurnEvent
from redraft.retrain import period
from redraft.retrain.period import latest_drop, latest_half

from .conftest import random_tokens
from .test_traffic import Traffic

pytestmark = pytest.mark.unit

SERVING = DrafterVersion("dflash", "serving")


def signal(since: float, time: float, direction: Direction = "drop", drafter: DrafterVersion = SERVING) -> DriftSignal:
    return DriftSignal(
        time=time,
        since=since,
        stratum=None,
        drafter=drafter,
        direction=direction,
        estimate=Estimate(-0.3, -0.4, -0.2, 50),
        reference=None,
    )


def found(signals: Sequence[DriftSignal], monkeypatch: pytest.MonkeyPatch) -> DriftSignal | None:
    class Monitor:
        def __init__(self, *arguments: object) -> None:
            pass

        def update(self, event: TurnEvent) -> list[DriftSignal]:
            return [each for each in signals if each.time == event.time]

    monkeypatch.setattr(period, "DriftMonitor", Monitor)
    traffic = Traffic()
    for each in signals:
        traffic.turn("session", each.time, random_tokens(20, 1), 10)
    return latest_drop(traffic.events, SERVING, DriftConfig(), ())


def test_a_drop_that_is_signalled_again_and_again_began_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [signal(100, 120), signal(105, 130), signal(133, 230), signal(240, 330)]
    drop = found(again, monkeypatch)
    assert drop is not None
    assert (drop.since, drop.time) == (100, 330)


def test_a_drop_after_a_recovery_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = found([signal(100, 120), signal(900, 950)], monkeypatch)
    assert drop is not None
    assert drop.since == 900


def test_rises_and_other_versions_are_no_drop_of_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [signal(1, 2, "rise"), signal(3, 4, drafter=DrafterVersion("dflash", "before"))]
    assert found(others, monkeypatch) is None


def test_without_a_drop_new_is_the_later_half_of_baseline_sessions() -> None:
    traffic = Traffic()
    for number in range(8):
        traffic.turn(f"b{number}", number, random_tokens(20, number), 10, baseline=number % 2 == 0)
    assert latest_half(traffic.events).since == 4
    assert latest_half([]).since == 0

"""How often the monitor is wrong and how soon it is right, on recorded sessions drawn again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from redraft.engine.types import Stratum
from redraft.feedback.drift.config import DriftConfig
from redraft.feedback.drift.monitor import DriftMonitor
from redraft.feedback.drift.reference import Reference
from redraft.feedback.drift.signal import DriftSignal
from redraft.feedback.events import TurnEvent

from .traffic import Rng, Session, Traffic, changed, drawn, pooled, recorded, reference, session, stratum, thinned, turn

pytestmark = pytest.mark.unit


def by_stratum() -> dict[Stratum, list[Session]]:
    return {stratum(agent): sessions for agent, sessions in recorded().items()}


def references(rng: Rng, strata: dict[Stratum, list[Session]], sessions: int) -> list[Reference]:
    return [reference(drawn(rng, own, sessions), at) for at, own in strata.items()]


def first(monitor: DriftMonitor, events: Sequence[TurnEvent]) -> DriftSignal | None:
    return next((signal for event in events for signal in monitor.update(event)), None)


@pytest.mark.parametrize("streams", [40, pytest.param(500, marks=pytest.mark.nightly)])
def test_at_most_one_day_in_twenty_without_drift_has_an_alarm(streams: int) -> None:
    """At 1,000 sessions a day; references are made anew for every tenth day."""
    rng = np.random.default_rng(0)
    strata = by_stratum()
    traffic = Traffic(rng, strata)
    alarmed = 0
    for day in range(streams):
        if day % 10 == 0:
            known = references(rng, strata, 300)
        alarmed += first(DriftMonitor(DriftConfig(), known), traffic(1000)) is not None
    assert alarmed <= 0.05 * streams


@pytest.mark.parametrize(("sessions", "turns"), [(None, 1), (100, 1), (1000, 4)])
def test_false_alarms_of_all_charts_together_are_as_rare_as_configured(sessions: int | None, turns: int) -> None:
    """One in 1,000 sessions at most, with learnt, poor and good references, and where sessions interleave."""
    rng = np.random.default_rng(1)
    config = DriftConfig(sessions_per_false_alarm=1000, cooldown_sessions=0)
    strata = [stratum(name) for name in ("a", "b")]
    pool = [session(rng, turns=turns) for _ in range(1000)]
    alarms = total = 0
    for _ in range(5):
        known = (
            [reference(drawn(rng, [pooled(turns) for turns in pool], sessions), at) for at in strata]
            if sessions
            else ()
        )
        monitor = DriftMonitor(config, known)
        for group in range(120 if sessions else 240):
            running = rng.integers(0, len(pool), 10)
            alarms += sum(
                len(monitor.update(turn(pool[which][k], f"{group}-{number}", at=strata[number % 2])))
                for k in range(turns)
                for number, which in enumerate(running)
            )
        total += sum(row.sessions for row in monitor.status().strata if row.stratum)
    assert alarms <= 1.3 * total / config.sessions_per_false_alarm


def test_a_drop_of_a_tenth_is_found_within_two_hundred_sessions() -> None:
    """In all strata alike, at the recorded spread of sessions and the recorded mix."""
    rng = np.random.default_rng(2)
    strata = by_stratum()
    traffic = Traffic(rng, {at: changed(rng, own, -0.1) for at, own in strata.items()}, mix_of(strata))
    known = references(rng, strata, 500)
    found = [first(monitor_in_use(known, strata, rng), traffic(200)) for _ in range(25)]
    assert sum(signal is not None for signal in found) >= 0.8 * len(found)
    assert {signal.direction for signal in found if signal} == {"drop"}


def mix_of(strata: dict[Stratum, list[Session]]) -> list[float]:
    total = sum(map(len, strata.values()))
    return [len(own) / total for own in strata.values()]


def monitor_in_use(known: list[Reference], strata: dict[Stratum, list[Session]], rng: Rng) -> DriftMonitor:
    """One that has seen 300 sessions as they should be."""
    monitor = DriftMonitor(DriftConfig(), known)
    first(monitor, Traffic(rng, strata, mix_of(strata))(300))
    return monitor


def test_a_change_of_mix_alone_is_no_drift() -> None:
    """From mostly prose to mostly tool calls: pooled accept length more than half as high again, and nothing fires."""
    rng = np.random.default_rng(3)
    strata = by_stratum()
    traffic = Traffic(rng, strata)
    high = [float(reference(own).reached[0] < reference(own).accepted[0] * 1.7) for own in strata.values()]
    towards = [0.9 * h / sum(high) + 0.1 * (1 - h) / (len(high) - sum(high)) for h in high]
    away = [0.1 * h / sum(high) + 0.9 * (1 - h) / (len(high) - sum(high)) for h in high]
    before, after = (length_of(traffic(1000, mix)) for mix in (away, towards))
    assert after > 1.5 * before
    fired = 0
    for stream in range(25):
        if stream % 5 == 0:
            known = references(rng, strata, 300)
        monitor = DriftMonitor(DriftConfig(), known)
        fired += first(monitor, [*traffic(300, away), *traffic(300, towards)]) is not None
    assert fired == 0


def length_of(events: Sequence[TurnEvent]) -> float:
    counts = [counts for event in events for counts in event.counts]
    return sum(c.committed for c in counts) / sum(c.verify_steps for c in counts)


def test_a_tenth_of_the_steps_explored_alarms_no_more_though_the_reference_saw_all() -> None:
    rng = np.random.default_rng(4)
    whole = [session(rng, steps=100)[0] for _ in range(1000)]
    part = [thinned(rng, counts, share=0.1) for counts in whole]
    traffic = Traffic(rng, {stratum(): [counts for counts in part if counts[0][0]]})
    config = DriftConfig(sessions_per_false_alarm=1000, cooldown_sessions=0)
    monitor = DriftMonitor(config, [reference(whole)])
    alarms = sum(len(monitor.update(event)) for event in traffic(10_000))
    assert alarms <= 1.3 * 10_000 / 1000

"""What the monitor says of a stratum, what it leaves out, and that it neither forgets nor grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pytest

from redraft.engine.types import DrafterVersion, Stratum
from redraft.feedback.drift import monitor as module
from redraft.feedback.drift.chart import RECENT_SESSIONS
from redraft.feedback.drift.config import DriftConfig
from redraft.feedback.drift.monitor import OTHER, DriftMonitor
from redraft.feedback.drift.reference import Reference
from redraft.feedback.drift.signal import DriftSignal, StratumStatus
from redraft.feedback.events import TurnEvent

from .traffic import DFLASH, Session, changed, reference, session, stratum, turn

pytestmark = pytest.mark.unit

NGRAM = DrafterVersion("ngram", "n")
NEXT = DrafterVersion("dflash", "d2")
CONFIG = DriftConfig()


@pytest.fixture(scope="module")
def stable() -> list[Session]:
    rng = np.random.default_rng(0)
    return [session(rng)[0] for _ in range(2000)]


@pytest.fixture(scope="module")
def worse(stable: list[Session]) -> list[Session]:
    return changed(np.random.default_rng(1), stable, -0.2, copies=1)


@pytest.fixture(scope="module")
def known(stable: list[Session]) -> Reference:
    return reference(stable)


def answers(
    sessions: Iterable[Session], name: str, *, at: Stratum | None = None, drafter: DrafterVersion = DFLASH
) -> Iterator[TurnEvent]:
    for number, counts in enumerate(sessions):
        yield turn(counts, f"{name}-{number}", time=float(number), at=at, drafter=drafter)


def feed(monitor: DriftMonitor, events: Iterable[TurnEvent]) -> list[DriftSignal]:
    return [signal for event in events for signal in monitor.update(event)]


def cell(monitor: DriftMonitor, at: Stratum | None = None, drafter: DrafterVersion = DFLASH) -> StratumStatus:
    found = [row for row in monitor.status().strata if row.stratum == (at or stratum()) and row.drafter == drafter]
    assert len(found) == 1
    return found[0]


def test_a_drop_is_a_drop_with_its_size_its_interval_and_its_beginning(
    stable: list[Session], worse: list[Session], known: Reference
) -> None:
    monitor = DriftMonitor(CONFIG, [known])
    assert feed(monitor, answers(stable[:300], "a")) == []
    assert cell(monitor).state == "watching"
    events = [msgspec.structs.replace(event, time=300 + event.time) for event in answers(worse, "b")]
    (signal, *_) = feed(monitor, events[:150])
    assert (signal.stratum, signal.drafter, signal.direction) == (stratum(), DFLASH, "drop")
    assert -0.25 < signal.estimate.low < signal.estimate.effect < -0.1 < signal.estimate.high < 0
    assert 250 <= signal.since <= 320 < signal.time
    assert signal.estimate.sessions == pytest.approx(signal.time - signal.since, abs=2)
    assert signal.reference == known
    assert cell(monitor).state == "drifted"


def test_a_rise_is_a_rise(stable: list[Session], worse: list[Session]) -> None:
    monitor = DriftMonitor(CONFIG, [reference(worse)])
    (signal, *_) = feed(monitor, answers(stable[:300], "a"))
    assert signal.direction == "rise"
    assert signal.estimate.low < 0.25 < signal.estimate.high


def test_well_under_the_floor_is_no_signal(stable: list[Session], known: Reference) -> None:
    slightly = changed(np.random.default_rng(2), stable, -0.02, copies=1)
    monitor = DriftMonitor(CONFIG, [known])
    assert feed(monitor, answers(slightly, "a")) == []
    estimate = cell(monitor).estimate
    assert estimate is not None
    assert estimate.low < -0.02 < estimate.high


def test_too_few_sessions_are_no_signal_whatever_they_say(known: Reference) -> None:
    nothing = [((200,) + (0,) * 6, (0,) * 7)] * 30
    monitor = DriftMonitor(CONFIG, [known])
    assert feed(monitor, answers(nothing[:19], "a")) == []
    assert len(feed(monitor, answers(nothing, "b"))) == 1


def test_a_stratum_without_a_reference_learns_one_and_cannot_alarm_meanwhile(
    stable: list[Session], worse: list[Session]
) -> None:
    monitor = DriftMonitor(CONFIG)
    assert feed(monitor, answers([*stable[:100], *worse[:100]], "a")) == []
    status = cell(monitor)
    assert (status.state, status.learnt, status.to_learn) == ("learning", 200, 200)
    assert status.reference is None
    feed(monitor, answers(stable[:1000], "b"))
    learnt = cell(monitor).reference
    assert learnt is not None
    assert learnt.sessions >= 200
    assert learnt.cv / learnt.sessions**0.5 <= CONFIG.effect_floor / 3


def test_a_noisy_stratum_learns_for_longer_but_not_for_ever() -> None:
    extremes = [((20, 20), (20, 20)), *[((20, 0), (0, 0))] * 3] * 500
    monitor = DriftMonitor(CONFIG)
    assert feed(monitor, answers(extremes, "a")) == []
    assert cell(monitor).reference is not None
    assert cell(monitor).to_learn == 5 * CONFIG.learning_sessions


def test_a_signal_is_followed_by_quiet_and_repeated_while_it_lasts(worse: list[Session], known: Reference) -> None:
    signals = feed(DriftMonitor(CONFIG, [known]), answers(worse[:1000], "a"))
    times = [signal.time for signal in signals]
    assert len(times) >= 3
    assert np.diff(times).min() >= CONFIG.cooldown_sessions


def test_what_recovers_cools_and_is_watched_again(
    stable: list[Session], worse: list[Session], known: Reference
) -> None:
    monitor = DriftMonitor(CONFIG, [known])
    events = answers(worse, "a")
    while not monitor.update(next(events)):
        pass
    assert feed(monitor, answers(stable[:150], "b")) == []
    assert cell(monitor).state == "cooling"
    assert feed(monitor, answers(stable[150:600], "c")) == []
    assert cell(monitor).state == "watching"


def test_an_unseen_stratum_is_new_and_not_drift(stable: list[Session], worse: list[Session], known: Reference) -> None:
    monitor = DriftMonitor(CONFIG, [known])
    feed(monitor, answers(stable[:50], "a"))
    assert feed(monitor, answers(worse[:150], "b", at=stratum("stranger"))) == []
    assert cell(monitor, stratum("stranger")).new
    assert cell(monitor, stratum("stranger")).state == "learning"
    assert not cell(monitor).new


def test_each_drafter_version_has_its_own_reference(stable: list[Session], worse: list[Session]) -> None:
    monitor = DriftMonitor(CONFIG, [reference(stable), reference(worse, drafter=NEXT)])
    assert feed(monitor, answers(stable[:500], "a")) == []
    assert feed(monitor, answers(worse[:500], "b", drafter=NEXT)) == []
    assert {row.drafter for row in monitor.status().strata} == {DFLASH, NEXT}


def test_a_given_reference_takes_the_place_of_a_learnt_one(stable: list[Session], known: Reference) -> None:
    monitor = DriftMonitor(CONFIG)
    feed(monitor, answers(stable[:50], "a"))
    monitor.expect(known)
    assert (cell(monitor).state, cell(monitor).reference) == ("watching", known)


def test_a_session_that_two_versions_served_counts_for_the_first_alone(stable: list[Session], known: Reference) -> None:
    monitor = DriftMonitor(CONFIG, [known])
    monitor.update(turn(stable[0], "s"))
    monitor.update(turn(stable[1], "s", drafter=NEXT))
    status = monitor.status()
    assert status.two_versions == 1
    assert {row.drafter for row in status.strata} == {DFLASH}


def test_looping_answers_are_counted_and_left_out(stable: list[Session], known: Reference) -> None:
    monitor = DriftMonitor(CONFIG, [known])
    assert feed(monitor, (turn(stable[0], f"s{n}", looping=True) for n in range(10))) == []
    assert monitor.status().looping == 10
    assert monitor.status().strata == ()


def test_the_floor_is_watched_only_where_nothing_else_serves(stable: list[Session]) -> None:
    both = turn(stable[0], "s")
    floor = turn(stable[1], "s", drafter=NGRAM)
    monitor = DriftMonitor(CONFIG)
    monitor.update(msgspec.structs.replace(both, counts=(*both.counts, *floor.counts)))
    monitor.update(floor)
    assert {row.drafter for row in monitor.status().strata} == {DFLASH}
    alone = DriftMonitor(CONFIG)
    alone.update(floor)
    assert {row.drafter for row in alone.status().strata} == {NGRAM}


def test_answers_without_explored_steps_count_for_the_accept_length_alone(stable: list[Session]) -> None:
    monitor = DriftMonitor(CONFIG)
    event = turn(stable[0], "s")
    (counts,) = event.counts
    silent = msgspec.structs.replace(counts, reached=(), accepted=(), explored_steps=0)
    monitor.update(msgspec.structs.replace(event, counts=(silent,)))
    status = cell(monitor)
    assert (status.learnt, status.explored_steps) == (0, 0)
    assert status.accept_length.verify_steps == counts.verify_steps


def test_a_monitor_that_was_stopped_goes_on_as_if_it_was_not(
    stable: list[Session], worse: list[Session], known: Reference
) -> None:
    def traffic() -> list[TurnEvent]:
        rng = np.random.default_rng(3)
        found = list(answers([*stable[:300], *worse[:400]], "a"))
        found += answers([*stable[300:600], *worse[400:800]], "b", at=stratum("learnt"))
        return [found[i] for i in rng.permutation(len(found))]

    unbroken = DriftMonitor(CONFIG, [known])
    expected = feed(unbroken, traffic())
    assert len(expected) >= 2
    broken, got = DriftMonitor(CONFIG, [known]), []
    for number, event in enumerate(traffic()):
        if number % 97 == 0:
            broken = DriftMonitor(CONFIG, [known], broken.save())
        got += broken.update(event)
    assert got == expected
    assert broken.status() == unbroken.status()
    assert broken.save() == unbroken.save()


def test_state_that_is_none_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        DriftMonitor(CONFIG, state=b"\x81\xa5cells\x01")


def test_memory_is_bounded(stable: list[Session], known: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 500)
    monitor = DriftMonitor(CONFIG, [known])
    feed(monitor, answers(stable, "a"))
    size = len(monitor.save())
    for round_ in range(2):
        feed(monitor, answers(stable, f"b{round_}"))
    assert len(monitor.save()) < 1.1 * size
    assert cell(monitor).sessions == 3 * len(stable)
    assert len(stable) > RECENT_SESSIONS


def test_strata_beyond_the_most_are_counted_together_and_never_alarm(
    stable: list[Session], worse: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STRATA", 3)
    monitor = DriftMonitor(CONFIG)
    for number in range(10):
        sessions = stable[:100] if number % 2 else worse[:100]
        assert feed(monitor, answers(sessions, f"a{number}", at=stratum(f"agent{number}"))) == []
    assert len(monitor.status().strata) == 4
    other = cell(monitor, OTHER)
    assert other.state == "not watched"
    assert other.accept_length.verify_steps == sum(
        counts[0][0] for number in range(3, 10) for counts in (stable[:100] if number % 2 else worse[:100])
    )


def test_versions_beyond_the_most_are_forgotten_oldest_first(stable: list[Session]) -> None:
    monitor = DriftMonitor(CONFIG)
    for number in range(7):
        event = turn(stable[0], f"s{number}", time=float(number), drafter=DrafterVersion("dflash", f"v{number}"))
        monitor.update(event)
    assert {row.drafter.id for row in monitor.status().strata} == {"v3", "v4", "v5", "v6"}

"""Serving never waits for what is kept of it, and every answer is written or counted as dropped."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.types import Commit
from redraft.feedback.capture import Capture
from redraft.feedback.config import FeedbackConfig
from redraft.feedback.events import START, Event, SpanEvent, TurnEvent
from redraft.feedback.local_contexts import LocalContextStore
from redraft.feedback.metrics import CaptureMetrics
from redraft.feedback.recorder import Recorder
from redraft.feedback.segments import SegmentLog

from .conftest import make_capture, make_step, make_turn, value

pytestmark = pytest.mark.unit


class FakeSink:
    """Keeps what it is given; ``fault`` is called before each append."""

    def __init__(self, fault: Callable[[], None] = lambda: None) -> None:
        self.events: list[Event] = []
        self.fault = fault
        self.closed = False

    def append(self, events: Sequence[Event]) -> None:
        self.fault()
        self.events += events

    def maintain(self, now: float) -> None: ...

    def close(self) -> None:
        self.closed = True


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def make_recorder(folder: Path, sink: Any = None, capture: Capture | None = None, **config: Any) -> Recorder:
    metrics = CaptureMetrics()
    return Recorder(
        capture or make_capture(),
        sink if sink is not None else SegmentLog(folder / "events", metrics=metrics),
        LocalContextStore(folder / "contexts", metrics=metrics),
        FeedbackConfig(**config),
        metrics,
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.feedback.recorder.RETRY_SECONDS", (0.001, 0.001))


def dropped(metrics: CaptureMetrics) -> dict[str, float]:
    causes = ("queue_full", "storage", "closed", "fault")
    return {cause: count for cause in causes if (count := value(metrics, "dropped_turns_total", cause=cause))}


def test_turns_are_written_with_their_tokens_and_counted(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    turn = make_turn([make_step(3, [5], [6])])
    recorder.record(turn)
    assert recorder.flush(10)
    events, _ = SegmentLog(tmp_path / "events").read(START, 10)
    assert isinstance(events[0], TurnEvent)
    assert isinstance(events[1], SpanEvent)
    context = LocalContextStore(tmp_path / "contexts").get("default", events[1].context)
    assert context is not None
    assert context.token_ids == (1, 2, 3, 9, 5)
    recorder.close()
    assert value(recorder.metrics, "recorded_turns_total") == 1
    assert value(recorder.metrics, "spans_total", reason="rejected") == 1
    assert value(recorder.metrics, "written_bytes_total", what="events") > 0
    assert value(recorder.metrics, "written_bytes_total", what="contexts") > 0
    assert value(recorder.metrics, "seconds_total", where="event_loop") > 0
    assert dropped(recorder.metrics) == {}


def test_of_a_burst_every_answer_is_written_or_dropped_and_no_two_events_are_alike(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, queue_turns=100)
    turns = 10_000
    for number in range(turns):
        recorder.record(make_turn(request_id=str(number)))
    recorder.flush(60)
    recorder.close()
    events, _ = SegmentLog(tmp_path / "events").read(START, turns)
    assert len({event.id for event in events}) == len(events) == value(recorder.metrics, "recorded_turns_total")
    assert set(dropped(recorder.metrics)) == {"queue_full"}
    assert len(events) + dropped(recorder.metrics)["queue_full"] == turns


def test_a_sink_that_hangs_holds_up_neither_serving_nor_shutdown(tmp_path: Path) -> None:
    release = threading.Event()
    sink = FakeSink(lambda: bool(release.wait()) and None)
    recorder = make_recorder(tmp_path, sink, queue_turns=5)
    for number in range(100):
        recorder.record(make_turn(request_id=str(number)))
    assert not recorder.flush(0.01)
    recorder.close(timeout=0.05)
    recorder.record(make_turn())
    release.set()
    recorder._thread.join(10)
    written = len(sink.events)
    assert written + sum(dropped(recorder.metrics).values()) == 101
    assert dropped(recorder.metrics)["queue_full"] > 0
    assert sink.closed


def test_the_queue_is_bounded_by_tokens_too(tmp_path: Path) -> None:
    release = threading.Event()
    recorder = make_recorder(tmp_path, FakeSink(lambda: bool(release.wait()) and None), queue_tokens=1000)
    for number in range(20):
        recorder.record(make_turn(prompt=range(400), request_id=str(number)))
    recorder.record(make_turn(prompt=range(2000)))
    release.set()
    assert recorder.flush(10)
    assert value(recorder.metrics, "recorded_turns_total") == 2
    assert dropped(recorder.metrics) == {"queue_full": 19}
    recorder.record(make_turn(prompt=range(400)))
    assert recorder.flush(10)
    assert value(recorder.metrics, "recorded_turns_total") == 3, "room comes back"
    recorder.close()


def test_a_fault_that_passes_costs_nothing_and_one_that_stays_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([full])
    sink = FakeSink(lambda: next(failures, lambda: None)())
    recorder = make_recorder(tmp_path, sink)
    recorder.record(make_turn(request_id="a"))
    assert recorder.flush(10)
    assert dropped(recorder.metrics) == {}
    assert caplog.records == []
    sink.fault = full
    for number in range(20):
        recorder.record(make_turn(request_id=str(number)))
        assert recorder.flush(10)
    assert dropped(recorder.metrics) == {"storage": 20}
    (line,) = caplog.records
    assert "answers are served but not recorded" in line.getMessage()
    assert "No space left on device" in line.getMessage()
    assert line.exc_info is None
    sink.fault = lambda: None
    recorder.record(make_turn(request_id="b"))
    recorder.close(10)
    assert [event.origin.request_id for event in sink.events] == ["a", "b"]


def test_where_there_is_no_room_retention_makes_some_at_once(tmp_path: Path) -> None:
    sink = FakeSink(full)
    recorder = make_recorder(tmp_path, sink)
    recorder.record(make_turn(request_id="a"))
    assert recorder.flush(10)
    sink.maintain = lambda now: setattr(sink, "fault", lambda: None)  # type: ignore[method-assign]
    recorder.record(make_turn(request_id="b"))
    recorder.close(10)
    assert [event.origin.request_id for event in sink.events] == ["b"]


def test_a_folder_that_cannot_be_written_is_said_once_and_everything_is_counted(
    unwritable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make_recorder(unwritable)
    for number in range(3):
        recorder.record(make_turn([make_step(3, [5], [6])], request_id=str(number)))
        assert recorder.flush(10)
    recorder.close(10)
    assert dropped(recorder.metrics) == {"storage": 3}
    (line,) = caplog.records
    assert str(unwritable.parent) in line.getMessage()


def test_of_two_recorders_on_one_folder_the_second_drops_until_the_first_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_recorder(tmp_path), make_recorder(tmp_path)
    first.record(make_turn(request_id="a"))
    assert first.flush(10)
    second.record(make_turn(request_id="b"))
    assert second.flush(10)
    assert dropped(second.metrics) == {"storage": 1}
    assert "another gateway records here" in caplog.text
    first.close(10)
    first._thread.join(10)
    second.record(make_turn(request_id="c"))
    second.close(10)
    events, _ = SegmentLog(tmp_path / "events").read(START, 10)
    assert [event.origin.request_id for event in events] == ["a", "c"]


def test_a_fault_of_the_policy_costs_its_turn_and_ends_nothing(tmp_path: Path) -> None:
    release = threading.Event()
    recorder = make_recorder(tmp_path, FakeSink(lambda: bool(release.wait()) and None))
    recorder.record(make_turn())
    for name in "abc":
        broken = {"time": float("nan")} if name == "b" else {}
        recorder.record(make_turn([make_step(3, [5], [6])], request_id=name, **broken))
    release.set()
    assert recorder.flush(10)
    assert dropped(recorder.metrics) == {"fault": 1}
    assert value(recorder.metrics, "recorded_turns_total") == 3
    recorder.close()


def test_a_fault_of_retention_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = FakeSink()
    sink.maintain = lambda now: 1 // 0  # type: ignore[assignment,method-assign,return-value]
    recorder = make_recorder(tmp_path, sink)
    recorder.record(make_turn())
    assert recorder.flush(10)
    assert len(sink.events) == 1
    assert "could not be removed" in caplog.text
    recorder.close()


def test_retention_is_applied_from_the_start(tmp_path: Path) -> None:
    contexts = LocalContextStore(tmp_path / "contexts")
    context = make_capture(baseline_share=1.0)(make_turn(time=time.time() - 8 * 86_400)).context
    assert context is not None
    contexts.put(context)
    recorder = make_recorder(tmp_path, FakeSink(), retention_days=7.0)
    recorder.record(make_turn())
    assert recorder.flush(10)
    assert list(contexts.ids("default")) == []
    assert value(recorder.metrics, "removed_total", what="turn") == 1
    recorder.close()


def test_a_recording_records_a_choice_once_when_it_ends(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, sink := FakeSink())
    turn = make_turn()

    def commit(*tokens: int, **fields: Any) -> Commit:
        return Commit(request_id="r", choice=0, token_ids=tokens, **fields)

    recording = recorder.recording(turn.request, 0, "target")
    recording.add(commit(9, seed=11))
    recording.add(commit(5, 6, verify_step=make_step(3, [5, 6], [5])))
    recording.add(commit(7, verify_step=make_step(5, [7], [7]), finish_reason="stop"))
    recording.abandon()
    cut_off = recorder.recording(turn.request, 1, "target")
    cut_off.add(commit(9))
    cut_off.abandon()
    cut_off.abandon()
    recorder.recording(turn.request, 2, "target").abandon()
    recorder.close(10)
    turns = [event for event in sink.events if isinstance(event, TurnEvent)]
    assert [(each.origin.choice, each.finish_reason, each.completion_tokens) for each in turns] == [
        (0, "stop", 4),
        (1, "abort", 1),
    ]
    assert turns[0].sampling.seed == 11
    assert turns[0].counts[0].committed == 3


def test_what_is_closed_takes_nothing_and_says_so_in_the_counts(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    recorder.close()
    recorder.record(make_turn())
    assert dropped(recorder.metrics) == {"closed": 1}

"""The event log loses nothing that was written, whatever ends its writer, and says what it cannot read."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redraft.feedback.events import START, Event, SpanEvent, event_id
from redraft.feedback.segments import LogBusy, SegmentDamaged, SegmentLog

from .conftest import make_capture, make_step, make_turn

pytestmark = pytest.mark.unit


def make_events(count: int, first: int = 0, tenant: str = "default") -> list[Event]:
    event = make_capture()(make_turn()).events[0]
    origin = msgspec.structs.replace(event.origin, tenant=tenant)
    return [msgspec.structs.replace(event, id=event_id("r", 0, first + i, "turn"), origin=origin) for i in range(count)]


def read_all(log: SegmentLog, limit: int = 7) -> list[Event]:
    events, cursor = log.read(START, limit)
    found = list(events)
    while events:
        events, cursor = log.read(cursor, limit)
        found += events
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def open_files() -> list[str]:
    return [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def test_what_only_looks_like_a_segment_is_passed_over_by_name(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path)
    log.append(make_events(3))
    for name in ("²", "²" * 12 + ".seg", "7.seg", "000000000007.seg"):
        (tmp_path / name).mkdir()
    assert len(read_all(SegmentLog(tmp_path))) == 3
    assert log.size() == sum(path.stat().st_size for path in segments(tmp_path) if path.is_file())
    assert sorted(log.strays()) == ["000000000007.seg", "7.seg", "²", "²" * 12 + ".seg"]


def test_what_is_appended_is_read_in_order_by_any_reader_at_any_pace(tmp_path: Path) -> None:
    log, reader = SegmentLog(tmp_path / "log", segment_bytes=1000), SegmentLog(tmp_path / "log")
    events = make_events(50)
    seen, cursor, cursors = [], START, [START]
    for start in range(0, 50, 5):
        log.append(events[start : start + 5])
        fresh, cursor = reader.read(cursor, 3)
        seen += fresh
        cursors.append(cursor)
    while fresh:
        fresh, cursor = reader.read(cursor, 3)
        seen += fresh
        cursors.append(cursor)
    assert seen == events
    assert cursors == sorted(cursors)
    assert len(set(cursors)) == len(cursors) - 1, "every cursor but the last is passed by the next"
    assert len(segments(tmp_path / "log")) > 3
    assert read_all(SegmentLog(tmp_path / "log"), limit=1) == events
    assert reader.tail(8) == events[-8:]


def test_spans_come_back_as_they_were(tmp_path: Path) -> None:
    events = make_capture()(make_turn([make_step(3, [5], [6])])).events
    log = SegmentLog(tmp_path)
    log.append(events)
    assert tuple(read_all(log)) == events
    assert isinstance(events[1], SpanEvent)


def test_a_reader_before_there_is_a_log_waits_at_the_start(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path / "none")
    events, cursor = log.read(START, 10)
    assert events == []
    SegmentLog(tmp_path / "none").append(make_events(2))
    assert log.read(cursor, 10)[0] == make_events(2)


@pytest.mark.parametrize("lost", [1, 5, 9, 200])
def test_a_frame_cut_short_is_not_read_and_the_next_writer_cuts_it_off(tmp_path: Path, lost: int) -> None:
    log = SegmentLog(tmp_path)
    log.append(make_events(3))
    log.close()
    (path,) = segments(tmp_path)
    os.truncate(path, path.stat().st_size - lost)
    events, cursor = SegmentLog(tmp_path).read(START, 10)
    assert events == make_events(2)
    again = SegmentLog(tmp_path)
    again.append(make_events(1, first=3))
    assert again.read(cursor, 10)[0] == make_events(1, first=3)
    assert read_all(SegmentLog(tmp_path)) == [*make_events(2), *make_events(1, first=3)]


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path)
    log.append(make_events(2))
    log.close()
    with segments(tmp_path)[0].open("ab") as file:
        file.write(bytes(5000))
    again = SegmentLog(tmp_path)
    again.append(make_events(1, first=2))
    assert read_all(again) == make_events(3)


def test_a_damaged_frame_is_an_error_that_says_where_and_reading_goes_on_behind_its_segment(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=1000)
    for start in range(0, 12, 3):
        log.append(make_events(3, first=start))
    damaged = segments(tmp_path)[1]
    data = bytearray(damaged.read_bytes())
    at = len(data) // 2
    data[at] ^= 1
    damaged.write_bytes(data)
    first, cursor = log.read(START, 100)
    assert make_events(12)[: len(first)] == first
    with pytest.raises(SegmentDamaged, match=rf"{damaged} is damaged at byte \d+") as caught:
        log.read(cursor, 100)
    assert caught.value.offset <= at
    rest, _ = log.read(caught.value.resume, 100)
    assert rest == make_events(12)[-len(rest) :]
    assert len(first) + len(rest) >= 8
    later = SegmentLog(tmp_path)
    assert later.tail(2) == make_events(12)[-2:]


def test_no_damage_makes_an_event_that_was_not_written(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=1500)
    events = make_events(8)
    for event in events:
        log.append([event])
    log.close()
    whole = {path: path.read_bytes() for path in segments(tmp_path)}
    rng = random.Random(1)
    lost = 0
    for _ in range(300):
        path = rng.choice(list(whole))
        data = bytearray(whole[path])
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        reader = SegmentLog(tmp_path)
        found = list(reader.events())
        assert all(damage.path == path for damage in reader.damaged)
        assert all(event in events for event in found)
        assert sum(event in found for event in events) == len(found) >= 4
        lost += len(found) < 8
        path.write_bytes(whole[path])
    assert lost > 200


def test_what_a_later_version_wrote_is_passed_over_and_counted(tmp_path: Path) -> None:
    class Later(msgspec.Struct, tag="later"):
        schema: int = 2

    log = SegmentLog(tmp_path)
    (event,) = make_events(1)
    unknown_reason = msgspec.structs.replace(
        make_capture(baseline_share=1.0)(make_turn([make_step(3, [5], [6])])).events[1], reason="from_the_future"
    )
    newer = {**msgspec.to_builtins(event), "type": "turn", "schema": 2, "new_field": [1, {"a": 2}]}
    mixed: Any = [event, Later(), unknown_reason, newer, event]
    log.append(mixed)
    reader = SegmentLog(tmp_path)
    events = read_all(reader)
    assert [each.schema for each in events] == [1, 2, 1]
    assert reader.unknown == 2


def test_one_process_writes_and_a_second_is_refused_until_it_is_gone(tmp_path: Path) -> None:
    first, second = SegmentLog(tmp_path), SegmentLog(tmp_path)
    first.append(make_events(1))
    with pytest.raises(LogBusy, match="another gateway records here"):
        second.append(make_events(1, first=1))
    second.maintain(time.time())
    first.close()
    second.append(make_events(1, first=1))
    assert read_all(SegmentLog(tmp_path)) == make_events(2)


def test_the_oldest_segments_go_first_and_readers_go_on_with_what_is_left(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, max_bytes=8000)
    begin, cursor = log.read(START, 0)
    for at in range(100):
        log.append(make_events(1, first=at))
        if at == 2:
            begin, cursor = log.read(START, 1)
    assert begin == make_events(1)
    assert log.size() <= 8000 + 2000
    rest, _ = log.read(cursor, 1000)
    assert rest == make_events(100)[-len(rest) :]
    assert 5 < len(rest) < 50
    assert log._metrics.registry.get_sample_value("redraft_capture_removed_total", {"what": "segment"})


def test_segments_expire_even_where_nothing_is_written_any_more(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, max_age=1000)
    log.append(make_events(2))
    _, cursor = log.read(START, 10)
    log.close()
    (path,) = segments(tmp_path)
    later = SegmentLog(tmp_path, max_age=1000)
    later.maintain(time.time())
    assert path.exists()
    os.utime(path, (1, 1))
    later.maintain(time.time())
    assert not path.exists()
    later.append(make_events(1, first=2))
    assert log.read(cursor, 10)[0] == make_events(1, first=2), "a cursor is never ahead of what is written later"


def test_a_clock_set_back_neither_reorders_nor_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SegmentLog(tmp_path, segment_bytes=1, max_age=3600)
    now = time.time()
    for at, clock in enumerate([now, now - 1e6, now]):
        monkeypatch.setattr("redraft.feedback.segments.time.time", lambda clock=clock: clock)
        log.append(make_events(1, first=at))
        log.maintain(clock)
    assert read_all(log) == make_events(3)


def test_a_folder_that_is_removed_under_the_writer_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = SegmentLog(folder)
    log.append(make_events(1))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    log.append(make_events(1, first=1))
    assert read_all(SegmentLog(folder)) == make_events(1, first=1)


def test_a_segment_that_is_removed_under_the_writer_gives_its_room_back(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path)
    log.append(make_events(1))
    (path,) = segments(tmp_path)
    path.unlink()
    assert f"{path} (deleted)" in open_files()
    log.maintain(time.time())
    assert f"{path} (deleted)" not in open_files()
    log.append(make_events(1, first=1))
    assert read_all(log) == make_events(1, first=1)


def test_what_a_full_disk_did_not_take_is_an_error_and_leaves_no_half_a_batch(tmp_path: Path) -> None:
    """A limit on file size stands in for the disk's."""
    log = SegmentLog(tmp_path)
    log.append(make_events(2))
    size = segments(tmp_path)[0].stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            log.append(make_events(4, first=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert segments(tmp_path)[0].stat().st_size == size
    log.append(make_events(4, first=2))
    assert read_all(log) == make_events(6)


def test_a_writer_killed_at_any_moment_leaves_a_log_that_reads_and_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom redraft.feedback.segments import SegmentLog\n"
        "from redraft.feedback.events import TurnEvent\nimport msgspec\n"
        "event = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=TurnEvent)\n"
        "log = SegmentLog(Path(sys.argv[1]), segment_bytes=20000)\n"
        "n = 0\n"
        "while True:\n"
        "    log.append([msgspec.structs.replace(event, id=str(n + i)) for i in range(40)])\n"
        "    n += 40\n"
        "    print(n, flush=True)\n"
    )
    (event,) = make_events(1)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), msgspec.msgpack.encode(event).hex()], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        said = 0
        while said < 4000:
            said = int(process.stdout.readline())
        process.kill()
        said = max([said, *map(int, process.stdout.read().split())])
    ids = [int(each.id) for each in read_all(SegmentLog(tmp_path), limit=1000)]
    assert ids == list(range(len(ids)))
    assert len(ids) >= said, "what was said to be written is there"
    log = SegmentLog(tmp_path)
    log.append([msgspec.structs.replace(event, id="last")])
    assert read_all(SegmentLog(tmp_path), limit=1000)[-1].id == "last"


def test_erased_events_are_gone_from_the_disk_and_cursors_stay_good(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=2000)
    mine, others = make_events(6, tenant="acme-secret"), make_events(6, first=6)
    for pair in zip(mine, others, strict=True):
        log.append(pair)
    _, cursor = log.read(START, 4)
    assert SegmentLog(tmp_path).erase(lambda event: event.origin.tenant == "acme-secret") == 6
    assert read_all(log) == others
    assert log.read(cursor, 100)[0] == others[2:]
    assert log.unknown == 0
    assert not any(b"acme-secret" in path.read_bytes() for path in segments(tmp_path))
    log.append(make_events(1, first=12))
    assert read_all(SegmentLog(tmp_path)) == [*others, *make_events(1, first=12)]


def test_erasure_says_where_damage_kept_it_from_reading_and_goes_on_behind(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=2000)
    for event in make_events(12, tenant="acme-secret"):
        log.append([event])
    first, *_, last = segments(tmp_path)
    data = bytearray(first.read_bytes())
    data[-5] ^= 0xFF
    first.write_bytes(data + b"more")
    eraser = SegmentLog(tmp_path)
    assert 0 < eraser.erase(lambda event: True) < 12
    assert [damage.path for damage in eraser.damaged] == [first]
    assert b"acme-secret" not in last.read_bytes()


def test_erasure_and_size_pass_over_a_segment_that_retention_takes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SegmentLog(tmp_path, segment_bytes=2000)
    for event in make_events(12):
        log.append([event])
    eraser = SegmentLog(tmp_path)
    listed = eraser._segments()
    monkeypatch.setattr(eraser, "_segments", lambda: listed)
    size = eraser.size()
    segments(tmp_path)[0].unlink()
    assert 0 < eraser.size() < size
    assert 0 < eraser.erase(lambda event: True) < 12


def test_reading_on_gives_what_is_new_and_passes_damage_once(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=2000)
    events = make_events(12)
    for event in events:
        log.append([event])
    reader = SegmentLog(tmp_path)
    *_, (_, cursor) = reader.read_on(START)
    assert list(reader.read_on(cursor)) == []
    damaged = segments(tmp_path)[-1]
    damaged.write_bytes(damaged.read_bytes() + b"\x05\0\0\0" + b"wrong" * 9)
    log.close()
    with (tmp_path / f"{int(damaged.stem) + 1:012d}.seg").open("wb") as later:
        later.write(damaged.read_bytes()[:0])
    *_, (_, cursor) = reader.read_on(cursor)
    assert len(reader.damaged) == 1
    assert list(reader.read_on(cursor)) == []
    assert len(reader.damaged) == 1


def test_only_its_user_may_read_the_log(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path / "log")
    log.append(make_events(1))
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    assert segments(tmp_path / "log")[0].stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(unwritable: Path) -> None:
    with pytest.raises(OSError, match=str(unwritable.parent)):
        SegmentLog(unwritable).append(make_events(1))
    assert SegmentLog(unwritable).read(START, 10)[0] == []

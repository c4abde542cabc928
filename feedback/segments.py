"""The local log of events: segments of checked frames, one writer, any number of readers in other processes.

A segment is a file of frames: length and CRC-32 of the payload (little-endian, 32 bits each), then an event as
msgpack. What was appended survives the death of its process; it is synced to the disk with the first append after
``SYNC_SECONDS`` and at the end of a segment, so a power cut may cost what the system had not written by itself. A frame
that a crash cut short at the end of the last segment is cut off by the next writer, and readers stop before it. An
erased event keeps its place, overwritten, so that cursors stay good.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from redraft.feedback.events import START, Cursor, Event
from redraft.feedback.metrics import CaptureMetrics

SUFFIX = ".seg"
LOCK = "lock"
SEGMENT_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20
READ_AT_ONCE = 1000
SYNC_SECONDS = 5.0
ROTATE_SECONDS = 86_400.0
"""A segment takes no more events after this long, so that those of little traffic expire too."""

_NAME = re.compile(rf"[0-9]{{12}}{re.escape(SUFFIX)}")
_HEAD = struct.Struct("<II")
_ERASED = b"\xc0"
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Event)


class LogBusy(OSError):
    """Another process writes this log."""


class SegmentDamaged(Exception):
    """A frame is not what was written; reading may go on at ``resume``, behind the segment."""

    def __init__(self, path: Path, offset: int, resume: Cursor) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: what follows in this file cannot be read.")
        self.path = path
        self.offset = offset
        self.resume = resume


class _Frame(Struct, frozen=True):
    offset: int
    end: int
    payload: bytes


class SegmentLog:
    """A folder of segments, both sink and source; it is touched when first appended to.

    ``unknown`` counts the events that this reader passed over because a later schema wrote them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int | None = None,
        max_age: float | None = None,
        metrics: CaptureMetrics | None = None,
    ) -> None:
        self._folder = folder
        self._segment_bytes = min(segment_bytes, max_bytes // 4) if max_bytes is not None else segment_bytes
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._metrics = metrics or CaptureMetrics()
        self._lock: int | None = None
        self._file: int | None = None
        self._number = 0
        self._end = 0
        self._begun = 0.0
        self._synced = 0.0
        self.unknown = 0
        self.damaged: list[SegmentDamaged] = []

    def append(self, events: Sequence[Event]) -> None:
        """Write all events, or none.

        Raises:
            LogBusy: another process writes here.
            OSError: the disk is full, or the folder cannot be written.
        """
        frames = [_frame(_ENCODER.encode(event)) for event in events]
        self._let_go()
        if self._file is None or self._end >= self._segment_bytes:
            self._begin()
        self._write(b"".join(frames))

    def maintain(self, now: float) -> None:
        """Remove the oldest segments, while all of them take too many bytes, and those last written too long ago."""
        self._let_go()
        try:
            segments = self._segments()
            if segments:
                self._acquire()
        except LogBusy:
            return
        if segments and now - self._begun > ROTATE_SECONDS and self._path(segments[-1]).stat().st_size:
            self._begin()
        self._retain(now)

    def close(self) -> None:
        if self._file is not None:
            self._sync()
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Event], Cursor]:
        """As `SpanSource.read`; where retention removed what followed ``cursor``, from the oldest that is left.

        Raises:
            SegmentDamaged: the next event cannot be read.
        """
        events: list[Event] = []
        number, offset = _parse(cursor)
        segments = self._segments()
        for segment in segments:
            if segment < number:
                continue
            if segment > number:
                number, offset = segment, 0
            try:
                for frame in self._frames(number, offset):
                    if len(events) == limit:
                        return events, _cursor(number, offset)
                    offset = frame.end
                    if (event := self._decode(frame)) is not None:
                        events.append(event)
                if segment != segments[-1] and offset < self._path(number).stat().st_size:
                    raise SegmentDamaged(self._path(number), offset, _cursor(number + 1, 0))
            except FileNotFoundError:
                continue
            except SegmentDamaged:
                if events:
                    return events, _cursor(number, offset)
                raise
        return events, _cursor(number, offset)

    def events(self) -> Iterator[Event]:
        """Every event there is, oldest first; damaged segments are passed over, and remembered in ``damaged``."""
        for events, _ in self.read_on(START):
            yield from events

    def read_on(self, cursor: Cursor) -> Iterator[tuple[list[Event], Cursor]]:
        """As `events`, of all that is behind ``cursor``: a few at a time, with the cursor behind them."""
        while True:
            try:
                events, cursor = self.read(cursor, READ_AT_ONCE)
            except SegmentDamaged as damage:
                self.damaged.append(damage)
                events, cursor = [], damage.resume
            else:
                if not events:
                    return
            yield events, cursor

    def tail(self, count: int) -> list[Event]:
        """The last events, oldest first; damaged segments give what can be read of them."""
        found: list[Event] = []
        for number in reversed(self._segments()):
            events: list[Event] = []
            with suppress(FileNotFoundError, SegmentDamaged):
                events.extend(filter(None, map(self._decode, self._frames(number, 0))))
            found = events + found
            if len(found) >= count:
                break
        return found[-count:] if count else []

    def erase(self, matches: Callable[[Event], bool]) -> int:
        """Overwrite the events that match, wherever they are; returns how many. The writer may go on meanwhile.

        What is behind damage cannot be told, so it stays; ``damaged`` says where.
        """
        erased = 0
        for number in self._segments():
            with suppress(FileNotFoundError), self._path(number).open("r+b", buffering=0) as file:
                try:
                    for frame in self._frames(number, 0):
                        event = self._decode(frame)
                        if event is not None and matches(event):
                            blank = _frame(_ERASED * len(frame.payload))
                            os.pwrite(file.fileno(), blank, frame.offset)
                            erased += 1
                except SegmentDamaged as damage:
                    self.damaged.append(damage)
                finally:
                    os.fdatasync(file.fileno())
        return erased

    def size(self) -> int:
        """Bytes of all segments."""
        total = 0
        for number in self._segments():
            with suppress(FileNotFoundError):
                total += self._path(number).stat().st_size
        return total

    def strays(self) -> list[str]:
        """Names of what is in the folder and no part of the log, which passes it over."""
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            return sorted(entry.name for entry in entries if entry.name != LOCK and not _is_segment(entry))

    def _decode(self, frame: _Frame) -> Event | None:
        if frame.payload.startswith(_ERASED):
            return None
        try:
            return _DECODER.decode(frame.payload)
        except msgspec.DecodeError:
            self.unknown += 1
            return None

    def _frames(self, number: int, offset: int) -> Iterator[_Frame]:
        """Whole frames from ``offset`` on; ends before one that is cut short."""
        path = self._path(number)
        data = _rest(path, offset)
        at = 0
        while at < len(data):
            payload, torn = _payload(data, at)
            if payload is None and not torn:
                data = _rest(path, offset)  # it may just be being erased
                payload, torn = _payload(data, at)
            if torn:
                return
            if payload is None:
                raise SegmentDamaged(path, offset + at, _cursor(number + 1, 0))
            end = at + _HEAD.size + len(payload)
            yield _Frame(offset + at, offset + end, payload)
            at = end

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{SUFFIX}"

    def _segments(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            return sorted(int(entry.name.removesuffix(SUFFIX)) for entry in entries if _is_segment(entry))

    def _acquire(self) -> None:
        """Become the log's writer."""
        if self._lock is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            message = "another gateway records here; give one of them a feedback.folder of its own"
            raise LogBusy(errno.EBUSY, message, str(self._folder)) from None
        self._lock = lock
        if segments := self._segments():
            self._cut(segments[-1])

    def _cut(self, number: int) -> None:
        """Cut what a crash left incomplete at the end of the last segment."""
        end = 0
        try:
            for frame in self._frames(number, 0):
                end = frame.end
        except SegmentDamaged:
            return
        os.truncate(self._path(number), end)

    def _begin(self) -> None:
        """Go on in a new segment; the one before is made durable.

        Numbers are seconds since the epoch or follow the last, so that they grow even where the folder was emptied.
        """
        self._acquire()
        number = max(int(time.time()), *(segment + 1 for segment in [0, *self._segments()]))
        file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._file is not None:
            self._sync()
            os.close(self._file)
        self._file, self._number, self._end = file, number, 0
        self._begun = time.time()
        self._synced = time.monotonic()
        self._retain(self._begun)

    def _let_go(self) -> None:
        """Of a segment that somebody removed: while it is open, the disk has no room from that."""
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self.close()

    def _retain(self, now: float) -> None:
        sizes = {number: self._path(number).stat() for number in self._segments()}
        total = sum(size.st_size for size in sizes.values())
        for number in list(sizes)[:-1]:
            too_many = self._max_bytes is not None and total > self._max_bytes
            too_old = self._max_age is not None and sizes[number].st_mtime < now - self._max_age
            if too_many or too_old:
                self._path(number).unlink(missing_ok=True)
                total -= sizes[number].st_size
                self._metrics.removed("segment")

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path(self._number)))
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += written
        self._metrics.wrote("events", written)

    def _sync(self) -> None:
        assert self._file is not None
        os.fdatasync(self._file)
        self._synced = time.monotonic()


def _is_segment(entry: os.DirEntry[str]) -> bool:
    return _NAME.fullmatch(entry.name) is not None and entry.is_file()


def _rest(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def _frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _payload(data: bytes, at: int) -> tuple[bytes | None, bool]:
    """The payload of the frame at ``at`` if it is whole, and whether a crash cut the frame short or left zeros."""
    if at + _HEAD.size > len(data):
        return None, True
    length, checksum = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    if end > len(data):
        return None, length <= MAX_FRAME_BYTES
    payload = data[at + _HEAD.size : end]
    if length and zlib.crc32(payload) == checksum:
        return payload, False
    return None, end == len(data) or not data[at:].strip(b"\0")


def _cursor(number: int, offset: int) -> Cursor:
    return f"{number:012d}:{offset:012d}"


def _parse(cursor: Cursor) -> tuple[int, int]:
    if not cursor:
        return 0, 0
    number, _, offset = cursor.partition(":")
    return int(number), int(offset)

"""What a deployment's own log says while it serves: accept length session by session, and drift."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from redraft.engine.types import AcceptLength, DrafterVersion
from redraft.feedback.drift.monitor import DriftMonitor
from redraft.feedback.drift.signal import DriftSignal
from redraft.feedback.events import START, Cursor, TurnEvent, session_hash
from redraft.feedback.segments import SegmentLog


class Answered(Struct, frozen=True):
    """One answer: where its tokens are, and whether it loops."""

    context: str | None
    looping: bool


class Served(Struct, kw_only=True):
    """One session as the log has it; ``time`` is of its last answer, ``length`` without looping ones."""

    time: float
    length: AcceptLength = AcceptLength()
    drafters: tuple[DrafterVersion, ...] = ()
    answers: tuple[Answered, ...] = ()


class Watch:
    """Follows a log; ``sessions`` are by the names their clients gave them, once `poll` has seen an answer."""

    def __init__(self, log: SegmentLog, monitor: DriftMonitor, tenant: str = "default") -> None:
        self._log = log
        self.monitor = monitor
        self._tenant = tenant
        self._cursor: Cursor = START
        self._by_hash: dict[str, Served] = {}
        self.turns = 0

    def poll(self) -> list[DriftSignal]:
        """Take in what was logged since the last call; signals that it set off."""
        signals: list[DriftSignal] = []
        for events, cursor in self._log.read_on(self._cursor):
            self._cursor = cursor
            for event in events:
                if isinstance(event, TurnEvent):
                    self._add(event)
                    signals += self.monitor.update(event)
        return signals

    def session(self, name: str) -> Served | None:
        return self._by_hash.get(session_hash(self._tenant, name))

    def length(self, names: Iterable[str]) -> AcceptLength:
        """Of all these sessions together."""
        found = (served for name in names if (served := self.session(name)))
        return sum((served.length for served in found), AcceptLength())

    @property
    def learnt(self) -> tuple[int, int]:
        """Sessions of the stratum that is furthest with its reference, and how many it takes."""
        rows = [row for row in self.monitor.status().strata if row.stratum is not None]
        best = max(rows, key=lambda row: row.accept_length.verify_steps, default=None)
        if best is None:
            return 0, 1
        return (best.to_learn if best.reference else best.learnt), best.to_learn

    @property
    def watching(self) -> bool:
        """Whether the stratum with most traffic has a reference to be compared with."""
        learnt, wanted = self.learnt
        return learnt >= wanted

    def _add(self, event: TurnEvent) -> None:
        self.turns += 1
        served = self._by_hash.setdefault(event.origin.session, Served(time=event.time))
        served.time = event.time
        served.answers += (Answered(event.context, event.looping),)
        if event.looping:
            return
        for counts in event.counts:
            served.length += AcceptLength(counts.committed, counts.verify_steps)
            if counts.drafter not in served.drafters:
                served.drafters += (counts.drafter,)

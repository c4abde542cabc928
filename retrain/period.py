"""Since when traffic is new: the period that a training run learns from and is judged on."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from redraft.engine.types import DrafterVersion
from redraft.feedback.drift.config import DriftConfig
from redraft.feedback.drift.monitor import DriftMonitor
from redraft.feedback.drift.reference import Reference
from redraft.feedback.drift.signal import DriftSignal
from redraft.feedback.events import Event, TurnEvent


class Period(Struct, frozen=True):
    """``since`` is in seconds since 1970; ``why`` says in words what set the run off."""

    since: float
    why: str


def latest_drop(
    events: Iterable[Event], serving: DrafterVersion, config: DriftConfig, references: Iterable[Reference]
) -> DriftSignal | None:
    """The last drop of the serving version that a monitor signals on all of the log, since it began.

    A drop that lasts is signalled again after every cool-down, and in one stratum after another: those that began
    before half of the time from the signal before them had passed are one.
    """
    monitor = DriftMonitor(config, references)
    drop: DriftSignal | None = None
    for event in events:
        for signal in monitor.update(event) if isinstance(event, TurnEvent) else ():
            if signal.drafter != serving or signal.direction != "drop":
                continue
            if drop is not None and signal.since - drop.time <= signal.time - signal.since:
                signal = replace(signal, since=min(drop.since, signal.since))
            drop = signal
    return drop


def latest_half(events: Iterable[Event]) -> Period:
    """From the middle one of all baseline sessions' beginnings, so that as many are left to be anchors."""
    begun: dict[str, float] = {}
    for event in events:
        if isinstance(event, TurnEvent) and event.baseline:
            begun[event.origin.session] = min(event.time, begun.get(event.origin.session, event.time))
    starts = sorted(begun.values())
    since = starts[len(starts) // 2] if starts else 0.0
    return Period(since, "asked for, without a sign of drift: the later half")

"""Since when traffic is new: the period that a training run learns from and is judged on."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

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
    """The last drop of the serving version that a monitor signals on all of the log."""
    monitor = DriftMonitor(config, references)
    signals = [signal for event in events if isinstance(event, TurnEvent) for signal in monitor.update(event)]
    drops = [signal for signal in signals if signal.drafter == serving and signal.direction == "drop"]
    return drops[-1] if drops else None


def latest_half(events: Iterable[Event]) -> Period:
    """From the middle one of all baseline sessions' beginnings, so that as many are left to be anchors."""
    begun: dict[str, float] = {}
    for event in events:
        if isinstance(event, TurnEvent) and event.baseline:
            begun[event.origin.session] = min(event.time, begun.get(event.origin.session, event.time))
    starts = sorted(begun.values())
    return Period(starts[len(starts) // 2] if starts else 0.0, "asked for, without a sign of drift")

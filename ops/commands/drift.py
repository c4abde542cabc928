"""Whether accept lengths are what they should be."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from redraft.engine.checkpoints import identity, resolve
from redraft.feedback.drift.monitor import DriftMonitor
from redraft.feedback.drift.signal import DriftSignal, DriftStatus, StratumStatus
from redraft.feedback.events import START, Cursor, TurnEvent
from redraft.feedback.segments import SegmentLog
from redraft.ops.commands.options import ConfigPath
from redraft.ops.commands.printing import console, moment
from redraft.ops.deployment import in_force
from redraft.ops.errors import UsageError
from redraft.ops.feedback import open_log
from redraft.retrain.registry.registry import open_registry

REFRESH_SECONDS = 2.0
WIDTH = 160
SHOWN_SIGNALS = 10


def drift(
    config: ConfigPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value alone on standard output.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on as answers come in, until Ctrl-C.")] = False,
) -> None:
    """Say where the drafter accepts more or less than it did, by the answers that are kept.

    Each stratum (tenant, agent type, context length, sampling, constrained or not) is compared with its own reference.
    """
    if as_json and watch:
        raise UsageError("--json and --watch exclude each other")
    settings = in_force(config)[0]
    registry = open_registry(settings.retrain.registry, identity(resolve(settings.engine.model)))
    monitor = DriftMonitor(
        settings.drift, (reference for entered in registry.all() for reference in entered.references)
    )
    for fault in registry.damaged().values():
        print(fault, file=sys.stderr)
    log = open_log(settings)
    signals, cursor = _follow(monitor, log, START)
    out = console(least=WIDTH)
    if as_json:
        print(msgspec.json.encode({"status": monitor.status(), "signals": signals}).decode())
    elif not watch:
        _say(out, monitor.status(), signals)
        for damage in log.damaged:
            print(damage)
    else:
        with Live(_table(monitor.status()), console=out, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_SECONDS)
                more, cursor = _follow(monitor, log, cursor)
                for signal in more:
                    live.console.print(_sentence(signal), markup=False)
                live.update(_table(monitor.status()), refresh=True)


def _follow(monitor: DriftMonitor, log: SegmentLog, after: Cursor) -> tuple[list[DriftSignal], Cursor]:
    """Give the monitor what is behind a cursor; damaged segments are passed over."""
    signals: list[DriftSignal] = []
    cursor = after
    for events, cursor in log.read_on(after):  # noqa: B007 (returned)
        for event in events:
            if isinstance(event, TurnEvent):
                signals += monitor.update(event)
    return signals, cursor


def _say(console: Console, status: DriftStatus, signals: list[DriftSignal]) -> None:
    if not status.strata:
        console.print("No answers with a drafter are kept yet.")
        return
    console.print(_table(status))
    console.print(
        f"Left out: {status.looping} looping answers, {status.two_versions} of sessions that two versions served"
    )
    for signal in signals[-SHOWN_SIGNALS:]:
        console.print(_sentence(signal), markup=False)


def _table(status: DriftStatus) -> Table:
    table = Table(
        "tenant", "agent", "context", "mode", "drafter", "sessions", "accept length", "expected", "change (95 %)",
        "state", "since", box=None,
    )  # fmt: skip
    table.pad_edge = False
    for row in status.strata:
        table.add_row(*_row(row))
    return table


def _row(row: StratumStatus) -> tuple[str, ...]:
    at = row.stratum
    where = ("all", "", "", "")
    if at is not None:
        mode = f"{at.mode}{', constrained' if at.constrained else ''}"
        where = (at.tenant, at.agent_type, f"≤ {at.context_bucket}", mode)
    state: str = row.state
    if row.state == "learning":
        state = f"learning {row.learnt}/{row.to_learn}"
    elif row.state == "watching" and row.threshold:
        state = f"watching ({min(row.statistic / row.threshold, 1):.0%} of an alarm)"
    length = row.accept_length
    return (
        *where,
        f"{row.drafter.kind}:{row.drafter.id[:8]}",
        str(row.sessions or "-"),
        f"{length.tau:.2f} ({length.committed}/{length.verify_steps})" if length.tau is not None else "-",
        f"{row.reference_tau:.2f}" if row.reference_tau is not None else "-",
        str(row.estimate) if row.estimate else "-",
        f"{state}{', new' if row.new else ''}",
        moment(row.since) if row.since is not None and row.state == "drifted" else "-",
    )


def _sentence(signal: DriftSignal) -> str:
    drafter = f"{signal.drafter.kind}:{signal.drafter.id[:8]}"
    return f"{moment(signal.time)}  {signal} since {moment(signal.since)} ({drafter})"

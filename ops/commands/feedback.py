"""What is kept of the answers served: looking at it, and forgetting it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

import typer
from rich.table import Table

from redraft.engine.types import AcceptLength
from redraft.feedback.events import Event, SpanEvent, TurnEvent, session_hash
from redraft.ops.commands.options import ConfigPath
from redraft.ops.commands.printing import console, moment
from redraft.ops.deployment import in_force
from redraft.ops.feedback import feedback_folder, open_contexts, open_log

WIDTH = 160
"""Columns of the table of events, wherever it is printed: a session's name is of use only whole."""

app = typer.Typer(help="What is kept of the answers served.", no_args_is_help=True)


@app.command()
def status(config: ConfigPath = None) -> None:
    """Say how much is kept, of what, and since when."""
    settings = in_force(config)[0]
    turns: Counter[str] = Counter()
    spans: Counter[str] = Counter()
    sessions: set[str] = set()
    baseline: set[str] = set()
    length = AcceptLength()
    first, last = math.inf, -math.inf
    log = open_log(settings)
    for event in log.events():
        first, last = min(first, event.time), max(last, event.time)
        if isinstance(event, SpanEvent):
            spans[event.reason] += 1
            continue
        turns[event.finish_reason] += 1
        sessions.add(event.origin.session)
        if event.baseline:
            baseline.add(event.origin.session)
        for counts in event.counts:
            length += AcceptLength(counts.committed, counts.verify_steps)
    print(f"folder: {feedback_folder(settings)}{'' if settings.feedback.enabled else ' (feedback.enabled is off)'}")
    print(f"answers: {turns.total()} ({_listed(turns)}), of {len(sessions)} sessions, {len(baseline)} of them baseline")
    print(f"spans: {spans.total()} ({_listed(spans)})")
    tau = f"{length.tau:.2f} " if length.tau is not None else ""
    print(f"accept length: {tau}({length.committed} tokens / {length.verify_steps} verify steps)")
    if first <= last:
        print(f"from {moment(first)} to {moment(last)}")
    feedback = settings.feedback
    taken = f"events take {_size(log.size())}, tokens {_size(open_contexts(settings).size())}"
    print(f"{taken}, and they may {_size(feedback.max_bytes)}")
    print(f"kept for {feedback.retention_days:g} days")
    if log.unknown:
        print(f"of a later version, passed over: {log.unknown} events")
    if strays := log.strays():
        print(f"no part of the log, passed over: {', '.join(strays)}")
    for damage in log.damaged:
        print(damage)


@app.command()
def show(
    config: ConfigPath = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last events.")] = 20,
) -> None:
    """List the last events."""
    settings = in_force(config)[0]
    events = open_log(settings).tail(lines)
    if not events:
        off = "" if settings.feedback.enabled else "; but feedback.enabled is off"
        print(f"Nothing is kept in {feedback_folder(settings)} yet. Answers of a running gateway are: redraft up{off}")
        return
    table = Table("time", "event", "tenant", "agent", "session", "drafter", "tokens", "accept length", box=None)
    table.pad_edge = False
    for event in events:
        table.add_row(*_row(event))
    console(least=WIDTH).print(table)


@app.command()
def erase(
    tenant: Annotated[str, typer.Option(help="Whose.")],
    session: Annotated[
        str | None, typer.Option(help="Only this session: its id as the client knows it, or as `show` lists it.")
    ] = None,
    config: ConfigPath = None,
) -> None:
    """Forget what was kept of a tenant, or of one session: events and tokens.

    Features that training keeps, and the data of a run, go whosever they are; one under way gives up. It may run beside
    a gateway; answers that end later are kept again.
    """
    settings = in_force(config)[0]
    names = None if session is None else {session, session_hash(tenant, session)}

    def matches(event: Event) -> bool:
        return event.origin.tenant == tenant and (names is None or event.origin.session in names)

    contexts = open_contexts(settings)
    turns = sum(contexts.erase(tenant, name) for name in names) if names else contexts.erase(tenant)
    log = open_log(settings)
    events = log.erase(matches)
    settings.retrain.forget_tokens()
    print(f"Erased {events} events and the tokens of {turns} turns")
    for damage in log.damaged:
        print(f"{damage} Remove it, to be sure that nothing of theirs is left there")
    if log.damaged:
        raise typer.Exit(1)


def _row(event: Event) -> tuple[str, ...]:
    origin = event.origin
    if isinstance(event, TurnEvent):
        drafters = {counts.drafter for counts in event.counts}
        what = f"turn ({event.finish_reason}{', baseline' if event.baseline else ''})"
        where = f"{event.prompt_tokens}+{event.completion_tokens}"
        committed = sum(counts.committed for counts in event.counts)
        steps = sum(counts.verify_steps for counts in event.counts)
    else:
        drafters = {event.drafter} if event.drafter else set()
        what = event.reason
        where = f"{event.start}-{event.end}"
        committed, steps = len(event.target_tokens), len(event.block_length)
    named = " ".join(f"{drafter.kind}:{drafter.id[:8]}" for drafter in drafters) or "-"
    pace = f"{committed}/{steps}"
    return moment(event.time), what, origin.tenant, origin.agent_type, origin.session, named, where, pace


def _size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    units = iter(("bytes", "KiB", "MiB", "GiB"))
    unit = next(units)
    for larger in units:
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.{0 if unit == 'bytes' else 1}f} {unit}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"

"""The loop, shown: what it does on this machine, from drift to recovery."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from redraft.ops.errors import CliError
from redraft.retrain.errors import Stopped

if TYPE_CHECKING:
    from redraft.ops.demo.results import Result
    from redraft.ops.demo.story import Story

GATE_REPORT = "gate-report"

app = typer.Typer(help="See the loop at work on this machine.", no_args_is_help=True)

TITLES = {
    "before": "before the rewrite",
    "drift": "after the rewrite",
    "training": "served while training",
    "recovered": "with the new drafter",
}


@app.callback()
def main() -> None:
    """See the loop at work on this machine."""


@app.command()
def drift(
    out: Annotated[Path, typer.Option(help="Folder for drift.png, result.json and the gate's report.")] = Path(
        "demo-drift"
    ),
    fast: Annotated[bool, typer.Option(help="Fewer and shorter sessions, the same parts.")] = False,
) -> None:
    """Let an agent's traffic drift, and watch its drafter recover.

    A deployment of its own serves an agent, the agent is rewritten, drift is noticed, a drafter is trained on the
    traffic, judged and swapped in while requests run; then a poisoned candidate is offered, and refused. Nothing is
    left running, and nothing of other deployments is touched.
    """
    from redraft.ops.demo.plot import draw
    from redraft.ops.demo.summary import sentences
    from redraft.retrain.gate.writing import PAGE

    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, highlight=False)
    try:
        with display(console) as show:
            result = asyncio.run(_play(fast, out, show))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise CliError("interrupted; nothing was left running") from None
    (out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    draw(result, out / "drift.png")
    for sentence in sentences(result):
        print(sentence, end="\n\n")
    print(f"{out / 'drift.png'} shows it; the numbers are in {out / 'result.json'}")
    if (page := out / GATE_REPORT / PAGE).exists():
        print(f"Why the gate decided so is in {page}")
    if result.run.outcome != "promoted":
        raise typer.Exit(1)


class _Display:
    """A line a part, and on a terminal progress bars."""

    def __init__(self, console: Console, bars: Progress) -> None:
        self._console = console
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self.stopped = False

    def tell(self, text: str) -> None:
        self._console.print(text, markup=False, style="dim", soft_wrap=True)

    def tick(self, phase: str, done: int, wanted: int, tau: float | None) -> None:
        title = TITLES.get(phase, phase)
        self.progress(done, wanted, f"{title}: accept length {tau:.2f}" if tau else title, key=phase)

    def progress(self, step: int, steps: int, text: str, key: str | None = None) -> None:
        """Raises `Stopped` once the demo is: threads that compute cannot be ended otherwise."""
        if self.stopped:
            raise Stopped("the demo was stopped")
        key = key or text.split()[0]
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(text, total=steps)
        self._bars.update(self._tasks[key], completed=step, total=steps, description=text)


@contextmanager
def display(console: Console) -> Iterator[_Display]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _Display(console, bars)


async def _play(fast: bool, out: Path, show: _Display) -> Result:
    from redraft.ops.demo.story import FAST, FULL, play

    plan = FAST if fast else FULL

    async def conclude(story: Story) -> Result:
        return await _conclude(story, fast, out, began, show)

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    show.tell(
        f"This takes about {plan.minutes} minutes on two cores with bf16, in nine parts; Ctrl-C ends it at any time"
    )
    began = time.time()
    try:
        return await play(plan, show.tell, show.tick, show.progress, conclude)
    except asyncio.CancelledError:
        show.stopped = True
        raise


async def _conclude(story: Story, fast: bool, out: Path, began: float, show: _Display) -> Result:
    from redraft.ops.demo import finale
    from redraft.ops.demo.results import Result, phase_rows, session_rows

    assert story.run is not None
    assert story.signal is not None
    finale.keep_report(story, out / GATE_REPORT)
    show.tell("7. Answers are given again without any drafter, to see that none of them changed")
    checked, violations = await finale.lossless(story, 6 if fast else 20, show.progress)
    old, serving = finale.bundled_folder(story), story.serving()
    judged = poisoned = new = None
    if story.run.outcome == "promoted" and serving is not None:
        new = story.registry.path(serving)
        target = await asyncio.to_thread(finale.frozen_target, story)
        show.tell("8. The answers of the last sessions are replayed through the old and the new drafter")
        judged = await asyncio.to_thread(finale.judged, story, old, new, target, 10 if fast else 20, show.progress)
        show.tell("9. The gate is offered a poisoned candidate")
        with TemporaryDirectory(prefix="redraft-") as work:
            poisoned = await finale.offer_poisoned(story, old, new, target, Path(work), show.progress)
    phases = list(phase_rows(story))
    estimate = story.signal.estimate
    first = phases[0].started
    return Result(
        fast=fast,
        began=first,
        seconds=time.time() - began,
        rewritten_at=next(row.started for row in phases if row.name == "drift") - first,
        detected_at=story.signal.time - first,
        gate_at=story.run.judged_from - first if story.run.judged_from else None,
        swapped_at=next((row.started - first for row in phases if row.name == "recovered"), None) if new else None,
        drift={
            "effect": estimate.effect,
            "low": estimate.low,
            "high": estimate.high,
            "sessions": estimate.sessions,
            "drafter": story.signal.drafter.id,
        },
        run=story.run,
        old=story.signal.drafter.id,
        new=serving.id if serving and new else None,
        phases=phases,
        judged=judged,
        poisoned=poisoned,
        lossless_checked=checked,
        lossless_violations=violations,
        failed_requests=sum(row.failed for row in phases),
        sessions=list(session_rows(story)),
    )

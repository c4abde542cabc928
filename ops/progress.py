"""How long something takes, on standard error: a bar on a terminal, a line a percent elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int, str], None]
"""Called with steps done, all steps, and what is being done."""


@contextmanager
def progress_bar() -> Iterator[Report]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def report(step: int, steps: int, text: str) -> None:
            bar.update(task, completed=step, total=steps, description=text)
            if not console.is_terminal and step * 100 // steps != (step - 1) * 100 // steps:
                console.print(f"{step}/{steps} {text}", markup=False, highlight=False, soft_wrap=True)

        yield report

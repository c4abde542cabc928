"""Models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from redraft.engine.checkpoints import identity, list_models, pull, resolve, validate
from redraft.ops.commands.options import ConfigPath
from redraft.ops.deployment import load

app = typer.Typer(help="Fetch and look at models.", no_args_is_help=True)

Name = Annotated[
    str | None,
    typer.Argument(help="A known name, a Hugging Face id, or a local folder; else the configuration's model."),
]


@app.command("pull")
def pull_model(name: Name = None, config: ConfigPath = None) -> None:
    """Fetch a model, check it and make it ready to serve. Costs nothing if it is here."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)
        said = ""

        def progress(what: str, done: int, total: int) -> None:
            nonlocal said
            bar.update(task, description=what, completed=done, total=total or None)
            if what != said and not console.is_terminal:
                console.print(what, markup=False)
            said = what

        folder = pull(name or load(config)[0].config.engine.model, progress=progress)
    print(folder)


@app.command("ls")
def list_all() -> None:
    """List known models and where they are."""
    for entry in list_models():
        print(f"{entry.name}  {entry.source}  {entry.licence or ''}  {entry.folder or '(not here)'}")


@app.command()
def show(name: Name = None, config: ConfigPath = None) -> None:
    """Print what a model on this machine is; its identity is what drafters belong to."""
    folder: Path = resolve(name or load(config)[0].config.engine.model)
    model = validate(folder)
    print(f"folder: {folder}")
    print(f"identity: {identity(folder)}")
    print(f"architecture: {model.architecture}")
    print(f"layers: {model.layers}")
    print(f"hidden: {model.hidden}")
    print(f"context: {model.context_length} tokens")

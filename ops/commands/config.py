"""Looking at the configuration."""

from __future__ import annotations

import typer

from redraft.ops.commands.options import ConfigPath, load
from redraft.ops.config import render

app = typer.Typer(help="What is in force, and from where.", no_args_is_help=True)


@app.callback()
def group() -> None: ...


@app.command()
def show(config: ConfigPath = None) -> None:
    """Print the effective YAML; each line says whether default, file or environment set it."""
    print(render(load(config)[0]), end="")

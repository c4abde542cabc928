"""Looking at the configuration."""

from __future__ import annotations

import typer

from redraft.ops.commands.options import ConfigPath
from redraft.ops.config import reference, render
from redraft.ops.deployment import load

app = typer.Typer(help="What is in force, and from where.", no_args_is_help=True)


@app.command()
def show(config: ConfigPath = None) -> None:
    """Print the effective YAML; each line says whether default, file or environment set it."""
    print(render(load(config)[0]), end="")


@app.command("reference")
def print_reference() -> None:
    """Print every setting with its default and what is allowed, as Markdown."""
    print(reference(), end="")

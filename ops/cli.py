"""The ``redraft`` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.protocol import EngineError
from redraft.ops.commands import (
    bench,
    chat,
    config,
    data,
    demo,
    doctor,
    drafters,
    drift,
    feedback,
    lifecycle,
    models,
    retrain,
    speculation,
    train,
)
from redraft.ops.errors import CliError
from redraft.retrain.data.errors import DataError
from redraft.retrain.errors import Stopped, TrainingError
from redraft.retrain.registry.errors import RegistryError

app = typer.Typer(
    help="An OpenAI-compatible gateway for agents, with a speculative drafter that learns from what it serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

STOPPED = 130
"""The exit status of what was asked to stop, as shells have it."""

SERVE = "Serve"
USE = "Use"
LOOK = "Look after it"
LEARN = "Train drafters"

app.command(rich_help_panel=SERVE)(lifecycle.up)
app.command(rich_help_panel=SERVE)(lifecycle.down)
app.command(rich_help_panel=SERVE)(lifecycle.serve)
app.command(rich_help_panel=SERVE)(lifecycle.status)
app.command(rich_help_panel=SERVE)(lifecycle.logs)
app.command(rich_help_panel=USE)(chat.chat)
app.add_typer(models.app, name="models", rich_help_panel=USE)
app.command(rich_help_panel=LOOK)(speculation.speculation)
app.command(rich_help_panel=LOOK)(doctor.doctor)
app.add_typer(config.app, name="config", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK)(bench.bench)
app.command(rich_help_panel=LOOK)(drift.drift)
app.add_typer(feedback.app, name="feedback", rich_help_panel=LOOK)
app.add_typer(drafters.app, name="drafters", rich_help_panel=LEARN)
app.add_typer(retrain.app, name="retrain", rich_help_panel=LEARN)
app.add_typer(data.app, name="data", rich_help_panel=LEARN)
app.add_typer(train.app, name="train", rich_help_panel=LEARN)
app.add_typer(demo.app, name="demo", rich_help_panel=LEARN)


@app.command("_engine", hidden=True)
def engine_process(config_path: Path) -> None:
    from redraft.ops.serving import run_engine

    run_engine(config_path)


@app.command("_gateway", hidden=True)
def gateway_process(config_path: Path, listen_fd: Annotated[int, typer.Option()]) -> None:
    from redraft.ops.serving import run_gateway

    run_gateway(config_path, listen_fd)


def main() -> None:
    """Run the command; a failure is one or two lines on standard error and an exit status of 1, or 2 for usage."""
    try:
        app()
    except CliError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        print(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except Stopped as error:
        print(error, file=sys.stderr)
        sys.exit(STOPPED)
    except (CheckpointError, DataError, EngineError, RegistryError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("REDRAFT_DEBUG"):
            raise
        print(
            f"error: unexpected {type(error).__name__}: {error}\n"
            "This is a fault of redraft; REDRAFT_DEBUG=1 shows where it happened.",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from redraft.ops.config import LoadedConfig, load_config
from redraft.ops.deployment import Deployment, State
from redraft.ops.errors import CliError

ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The deployment's YAML; else $REDRAFT_CONFIG, else the defaults."),
]


def load(path: Path | None) -> tuple[LoadedConfig, Deployment]:
    """The effective configuration and the deployment it names."""
    loaded = load_config(path, os.environ)
    return loaded, Deployment.of(loaded)


def running_state(path: Path | None) -> State:
    """The state of the deployment that must be running.

    Raises:
        CliError: it is not; the message names those that are.
    """
    _, deployment = load(path)
    state = deployment.read()
    if state is None or not deployment.is_locked():
        raise CliError(f"nothing is running here; start it with: redraft up{others(deployment)}")
    return state


def others(deployment: Deployment) -> str:
    """A hint naming the other deployments that run; empty if there are none."""
    states = [other.read() for other in Deployment.running() if other != deployment]
    known = [f"{state.url} (--config {state.config_path})" for state in states if state]
    return f"\nrunning elsewhere: {', '.join(known)}" if known else ""

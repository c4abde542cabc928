"""Options that several commands share."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from redraft.ops.config import ConfigError, LoadedConfig, load_config
from redraft.ops.deployment import Deployment, State, load
from redraft.ops.errors import CliError

ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The deployment's YAML; else $REDRAFT_CONFIG, else the defaults."),
]


def running_state(path: Path | None) -> State:
    """The state of the deployment that must be running.

    Raises:
        CliError: it is not; the message names those that are.
    """
    loaded, deployment = load(path)
    state = deployment.read()
    if state is None or not deployment.is_locked():
        raise CliError(f"nothing is running here; start it with: {typed('up', loaded)}{others(deployment)}")
    return state


def typed(command: str, loaded: LoadedConfig) -> str:
    """A command as it has to be typed for this deployment; ``redraft`` may not be on the PATH."""
    invoked = Path(sys.argv[0])
    program = "redraft" if shutil.which("redraft") or invoked.name != "redraft" else str(invoked)
    return f"{program} {command}" + (f" --config {loaded.path}" if loaded.path else "")


def others(deployment: Deployment) -> str:
    """A hint naming the other deployments that run; empty if there are none."""
    states = [(other, other.read()) for other in Deployment.running() if other != deployment]
    known = [f"{state.url} ({_how_to_name(other, state)})" for other, state in states if state]
    return f"\nrunning elsewhere: {', '.join(known)}" if known else ""


def _how_to_name(deployment: Deployment, state: State) -> str:
    """What makes a command mean this deployment; its file alone does not where the environment set the port."""
    path = Path(state.config_path) if state.config_path else None
    option = f"--config {path}" if path else "no --config"
    with contextlib.suppress(ConfigError):
        if Deployment.of(load_config(path, {})) == deployment:
            return option
    port = deployment.folder.name if deployment.folder.name.isdigit() else "0"
    return f"REDRAFT_GATEWAY__PORT={port}, {option}"

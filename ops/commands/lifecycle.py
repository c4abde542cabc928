"""Starting, stopping and watching a deployment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from redraft.ops.commands.options import ConfigPath, others, typed
from redraft.ops.config import dump
from redraft.ops.deployment import Deployment, State, in_force, load
from redraft.ops.errors import CliError
from redraft.ops.serving import PROGRAM
from redraft.ops.serving import serve as run_deployment
from redraft.ops.shelf import out_of_step

STOP_LIMIT = 9.0
"""Seconds that a deployment has to stop before it is killed."""

STOPPING = "running answers get a few seconds; Ctrl-C again ends them at once"

DEATHS = 2
"""How often a process may die while `up` waits for it to come back."""

LogName = Literal["engine", "gateway", "supervisor"]


def up(config: ConfigPath = None) -> None:
    """Start gateway and engine in the background; return when they answer.

    Doing it twice is harmless. `redraft down` stops them.
    """
    loaded, deployment = load(config)
    lock = deployment.lock(wait=0.5)
    if lock is None:
        state = _follow(deployment, None)
        print(f"Already running: {state.url}/v1")
        if state.config != dump(loaded.config):
            again = f"{typed('down', loaded)} && {typed('up', loaded)}"
            print(f"Settings have changed since it started; apply them with: {again}")
        return
    deployment.forget()
    state = _follow(deployment, _start_supervisor(loaded.path, deployment, lock))
    print(f"Ready: {state.url}/v1")
    print(f'Try it: {typed("chat", loaded)} --once "What is speculative decoding?"')


def down(config: ConfigPath = None) -> None:
    """Stop gateway and engine. Running answers get a few seconds to end."""
    _, deployment = load(config)
    if not deployment.is_locked(wait=0.5):
        print(f"Nothing is running here{others(deployment)}")
        return
    state = deployment.read()
    if state is None:
        raise CliError("it is only just starting; try again in a moment")
    for number in (signal.SIGTERM, signal.SIGKILL):
        state.supervisor.send(number)
        if not deployment.is_locked(wait=STOP_LIMIT):
            print(f"Stopped {state.url}")
            return
    raise CliError(f"process {state.supervisor.pid} does not end; look at {deployment.log('supervisor')}")


def serve(
    config: ConfigPath = None,
    lock_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run gateway and engine in the foreground until Ctrl-C."""
    loaded, deployment = load(config)
    lock = deployment.lock(wait=0.5) if lock_fd is None else lock_fd
    if lock is None:
        raise CliError("already running here; stop it with: redraft down")
    os.set_inheritable(lock, False)
    deployment.forget()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    last = ("", "")

    def report(state: State) -> None:
        nonlocal last
        if (state.phase, state.message) != last:
            last = (state.phase, state.message)
            what = state.message or (STOPPING if state.phase == "stopping" else state.url)
            console.print(f"{state.phase}: {what}", markup=False)

    with os.fdopen(lock):
        run_deployment(loaded, deployment, report)


def status(config: ConfigPath = None) -> None:
    """Show what runs. Exit status 0: ready; 1: not ready; 3: not running."""
    _, deployment = load(config)
    state = deployment.read()
    if not deployment.is_locked():
        print(f"Not running{f'; last: {state.phase} {state.message}'.rstrip() if state else ''}{others(deployment)}")
        raise typer.Exit(3)
    if state is None:
        print("Starting")
        raise typer.Exit(1)
    table = Table("process", "pid", "restarts", "state", box=None, pad_edge=False)
    table.add_row("supervisor", str(state.supervisor.pid), "", state.phase)
    for name, service in state.services.items():
        pid = str(service.process.pid) if service.process else "-"
        table.add_row(name, pid, str(service.restarts), service.detail)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{state.phase}: {state.url}/v1", markup=False)
    console.print(table)
    console.print(f"logs and state: {deployment.folder}", markup=False)
    if state.message:
        console.print(state.message, markup=False)
    if state.phase == "ready" and (difference := out_of_step(in_force(config)[0])):
        console.print(f"drafter: {difference}", markup=False)
    raise typer.Exit(0 if state.phase == "ready" else 1)


def logs(
    process: Annotated[LogName, typer.Argument(help="Whose log.")] = "engine",
    config: ConfigPath = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the last lines of a log."""
    _, deployment = load(config)
    path = deployment.log(process)
    if not path.exists():
        raise CliError(f"{path} does not exist: the {process} has not run here yet{others(deployment)}")
    with path.open(errors="replace") as file:
        for line in deque(file, maxlen=lines):
            sys.stdout.write(line)
        with contextlib.suppress(KeyboardInterrupt):
            while follow:
                sys.stdout.write(file.read())
                sys.stdout.flush()
                time.sleep(0.2)


def _start_supervisor(config: Path | None, deployment: Deployment, lock: int) -> subprocess.Popen[bytes]:
    """Start ``redraft serve`` in the background and hand the lock over to it."""
    command = [*PROGRAM, "serve", "--lock-fd", str(lock), *(["--config", str(config)] if config else [])]
    with deployment.log("supervisor").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            pass_fds=(lock,),
            start_new_session=True,
        )
    os.close(lock)
    return process


def _follow(deployment: Deployment, started: subprocess.Popen[bytes] | None) -> State:
    """Wait until the deployment is ready, or keeps dying; Ctrl-C takes back a start of our own."""
    console = Console(stderr=True, highlight=False)
    begin = time.monotonic()
    told = ""
    first_restarts: int | None = None
    try:
        with console.status("Starting") as line:
            while True:
                ended = started.poll() is not None if started else not deployment.is_locked()
                state = deployment.read()
                if state and state.phase == "ready":
                    return state
                if ended or (state and state.phase == "failed"):
                    raise CliError(_why(deployment, state))
                if state and state.phase == "degraded":
                    restarts = sum(service.restarts for service in state.services.values())
                    first_restarts = restarts if first_restarts is None else first_restarts
                    if restarts >= first_restarts + DEATHS:
                        raise CliError(f"{state.message}\nIt keeps dying; it goes on being started until redraft down")
                    if state.message != told:
                        told = state.message
                        console.print(f"{state.phase}: {told}", markup=False, soft_wrap=True)
                phase = state.phase if state else "starting"
                line.update(f"{phase.capitalize()} ({time.monotonic() - begin:.0f} s)")
                time.sleep(0.1)
    except KeyboardInterrupt:
        if started and started.poll() is None:
            started.terminate()
            started.wait()
        left = "nothing was left running" if started else "what runs goes on"
        raise CliError(f"interrupted; {left}") from None


def _why(deployment: Deployment, state: State | None) -> str:
    if state and state.message:
        return state.message
    log = deployment.log("supervisor")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-2:]).removeprefix("error: ") or "it stopped while starting"

"""Where one deployment keeps its lock, state, logs and socket, and who may write them.

A deployment is known by its port, since two cannot share one; with port 0 by its configuration file. Whoever holds
the lock is its supervisor: nothing else writes the state, and a state without a held lock is history.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from platformdirs import user_state_path

from redraft.ops.config import LoadedConfig, RedraftConfig, load_config
from redraft.ops.errors import CliError
from redraft.ops.processes import ProcessId

SOCKET_PATH_LIMIT = 107
"""Bytes that a Unix socket's path may have on Linux."""

Phase = Literal["starting", "ready", "degraded", "stopping", "stopped", "failed"]


class ServiceState(Struct, frozen=True, kw_only=True):
    """One supervised process; ``detail`` says what it is doing or what became of it."""

    process: ProcessId | None = None
    restarts: int = 0
    detail: str = ""


class State(Struct, frozen=True, kw_only=True):
    """What the supervisor last wrote about its deployment."""

    supervisor: ProcessId
    phase: Phase
    url: str
    config: str
    """The configuration it was started with, as YAML."""
    config_path: str | None = None
    message: str = ""
    services: dict[str, ServiceState] = {}


@dataclass(frozen=True)
class Deployment:
    """The folder of one deployment."""

    folder: Path

    @classmethod
    def of(cls, loaded: LoadedConfig) -> Deployment:
        port = loaded.config.gateway.port
        source = str(loaded.path.resolve()) if loaded.path else ""
        name = str(port) if port else f"any-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        return cls(_deployments() / name)

    @classmethod
    def running(cls) -> list[Deployment]:
        folders = sorted(_deployments().iterdir()) if _deployments().is_dir() else []
        return [deployment for deployment in map(cls, folders) if deployment.is_locked()]

    @property
    def effective_config(self) -> Path:
        return self.folder / "effective.yaml"

    def log(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    def socket(self, configured: Path | None) -> Path:
        """The engine's socket; checks its length.

        Raises:
            CliError: no socket can be bound at such a long path.
        """
        path = configured or self._run_folder() / "engine.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            raise CliError(
                f"{path}: too long for a socket ({SOCKET_PATH_LIMIT} bytes at most); "
                "set engine.socket to a shorter path, for example /tmp/redraft.sock"
            )
        return path

    def lock(self, wait: float = 0.0) -> int | None:
        """The deployment's lock as a file descriptor, or None if it is still held elsewhere after ``wait`` seconds."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return None
                time.sleep(0.05)

    def is_locked(self, wait: float = 0.0) -> bool:
        """Whether the lock is held, and still after ``wait`` seconds."""
        if not (self.folder / "lock").exists():
            return False
        descriptor = self.lock(wait)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def read(self) -> State | None:
        """The last written state; None if there is none that can be read."""
        try:
            return msgspec.json.decode((self.folder / "state.json").read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, state: State) -> None:
        """Replace the state in one step; only the holder of the lock may."""
        new = self.folder / "state.json.new"
        new.write_bytes(msgspec.json.encode(state))
        new.replace(self.folder / "state.json")

    def forget(self) -> None:
        """Remove the state of an earlier run, so that nobody takes it for this one's."""
        (self.folder / "state.json").unlink(missing_ok=True)

    def _run_folder(self) -> Path:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        return Path(runtime) / "redraft" / self.folder.name if runtime else self.folder


def _deployments() -> Path:
    return user_state_path("redraft") / "deployments"


def load(path: Path | None) -> tuple[LoadedConfig, Deployment]:
    """The effective configuration and the deployment it names."""
    loaded = load_config(path, os.environ)
    return loaded, Deployment.of(loaded)


LEARNING = ("feedback", "traffic", "drift", "retrain", "gate")
"""Sections of the configuration that decide how drafters are retrained."""


def unapplied(path: Path | None) -> list[str]:
    """Settings of `LEARNING` that a running deployment has otherwise than they are given now."""
    given, (applied, running) = load(path)[0].config, in_force(path)
    if not running:
        return []
    return [
        f"{section}.{key}"
        for section in LEARNING
        for key, value in getattr(given, section)
        if value != getattr(getattr(applied, section), key)
    ]


def in_force(path: Path | None) -> tuple[RedraftConfig, bool]:
    """What the deployment runs with, and True; where it does not run, what it would run with, and False."""
    loaded, deployment = load(path)
    running = deployment.is_locked() and deployment.effective_config.exists()
    return (load_config(deployment.effective_config, {}).config if running else loaded.config), running

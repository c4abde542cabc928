"""What is missing on this machine, and how to mend it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from redraft.engine.checkpoints import CheckpointError, identity, list_models, models_dir, resolve, validate
from redraft.engine.checkpoints.models import local_folder
from redraft.ops.commands.options import ConfigPath
from redraft.ops.config import LoadedConfig
from redraft.ops.deployment import Deployment, in_force, load
from redraft.ops.errors import CliError
from redraft.ops.shelf import TRAINED, out_of_step

PROC = Path("/proc")
MIN_FREE_DISK = 1 << 30
"""Bytes for the default model and logs."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at; ``mend`` says what to do unless it is ok."""

    level: Literal["ok", "warn", "fail"]
    what: str
    mend: str = ""


def doctor(config: ConfigPath = None) -> None:
    """Say what is missing and how to mend it. Exit status 1 if something would keep Redraft from running."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    for finding in check(config):
        color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        console.print(f"[{color}]{finding.level:>4}[/]", end="  ")
        console.print(finding.what, markup=False)
        if finding.mend:
            console.print(f"      {finding.mend}", markup=False)
        failed = failed or finding.level == "fail"
    raise typer.Exit(1 if failed else 0)


def check(config: Path | None) -> Iterator[Finding]:
    """Everything worth knowing before a start."""
    yield _python()
    yield from _extras()
    yield from _torch()
    yield from _mooncake()
    try:
        loaded, deployment = load(config)
    except CliError as error:
        yield Finding("fail", "configuration", str(error))
        return
    yield Finding("ok", f"configuration {loaded.path or '(defaults)'}")
    yield from _memory(loaded)
    yield _disk()
    yield _model(loaded)
    yield _drafter(loaded)
    yield from _deployment(loaded, deployment)


def _python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("fail", found, "The engine and the supervisor need Linux.")
    return Finding("ok", found)


def _extras() -> Iterator[Finding]:
    """``gpu`` brings SGLang and its own torch; beside ``engine`` or ``cluster`` one of them is broken."""
    if _version("sglang") and _version("mooncake-transfer-engine-non-cuda"):
        yield Finding(
            "fail",
            "extras gpu and cluster are installed together: two builds of Mooncake overwrite each other",
            "Use one virtual environment for each: pip install 'redraft[gpu]' or 'redraft[engine,cluster]'.",
        )
    if _version("sglang") and (torch := _version("torch")) and not torch.startswith(("2.11.", "2.14.")):
        yield Finding(
            "fail",
            f"SGLang {_version('sglang')} beside torch {torch}: extras gpu and engine are installed together",
            "Use one virtual environment for each: pip install 'redraft[gpu]' or 'redraft[engine]'.",
        )


def _torch() -> Iterator[Finding]:
    """Asks the package's own metadata and the CPU; importing torch takes seconds."""
    found = _version("torch")
    if found is None:
        yield Finding("fail", "no torch, so no embedded engine", "Install it: pip install 'redraft[engine]'")
        return
    yield Finding("ok", f"torch {found}")
    flags = _cpu_flags()
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        yield Finding("ok", "the CPU computes in bf16")
    else:
        yield Finding(
            "warn",
            "the CPU has no bf16 instructions",
            "Serving and training work, with fp32 products: slower, and over weights of twice the size.",
        )


def _mooncake() -> Iterator[Finding]:
    if _version("mooncake-transfer-engine-non-cuda") and find_library("ibverbs") is None:
        yield Finding("warn", "Mooncake lacks a system library", "Install it: apt-get install libibverbs1")


def _memory(loaded: LoadedConfig) -> Iterator[Finding]:
    free = [int(line.split()[1]) << 10 for line in _proc("meminfo") if line.startswith("MemAvailable:")]
    if not free:
        yield Finding("fail", "/proc is not there to tell how much memory is free", "Mount it: up and serve need it.")
        return
    (available,) = free
    needed = loaded.config.engine.kv_bytes + (1 << 30)
    what = f"{available / 1e9:.1f} GB of memory free; engine.kv_bytes and a small model take {needed / 1e9:.1f}"
    yield Finding("warn", what, "Set engine.kv_bytes lower.") if available < needed else Finding("ok", what)


def _disk() -> Finding:
    folder = models_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    what = f"{free / 1e9:.1f} GB free for models in {folder}"
    if free < MIN_FREE_DISK:
        return Finding("warn", what, "Free some space, or set XDG_CACHE_HOME to a folder on another disk.")
    return Finding("ok", what)


def _model(loaded: LoadedConfig) -> Finding:
    try:
        folder = resolve(loaded.config.engine.model)
        validate(folder)
        pulled = next((entry.identity for entry in list_models() if entry.folder == folder), None)
        if pulled and pulled != identity(folder):
            mend = f"Remove {folder} and fetch it again: redraft models pull {loaded.config.engine.model}"
            return Finding("fail", f"model {loaded.config.engine.model} is not what was pulled", mend)
    except CheckpointError as error:
        return Finding("fail", f"model {loaded.config.engine.model}", str(error))
    return Finding("ok", f"model {loaded.config.engine.model} in {folder}")


NAMES = ("none", "ngram", *TRAINED)


def _drafter(loaded: LoadedConfig) -> Finding:
    """Whether there is such a drafter; whether it fits the model is seen at the start, which imports torch."""
    name = loaded.config.engine.drafter
    folder = local_folder(name)
    if name in NAMES or (folder and (folder / "config.json").exists()):
        return Finding("ok", f"drafter {name}")
    mend = f"Set engine.drafter to {', '.join(NAMES)} or a checkpoint's folder (of a training run: its drafter/)."
    return Finding("fail", f"no drafter {name}", mend)


def _deployment(loaded: LoadedConfig, deployment: Deployment) -> Iterator[Finding]:
    try:
        yield Finding("ok", f"engine socket {deployment.socket(loaded.config.engine.socket)}")
    except CliError as error:
        yield Finding("fail", "engine socket", str(error))
    state = deployment.read()
    if deployment.is_locked() and state:
        level: Literal["ok", "warn"] = "ok" if state.phase == "ready" else "warn"
        yield Finding(level, f"running, {state.phase}: {state.url}", state.message)
        if state.phase == "ready" and (difference := out_of_step(in_force(loaded.path)[0])):
            yield Finding("warn", "another drafter version serves than should", difference)
        return
    yield Finding("ok", "not running")
    yield _port(loaded.config.gateway.host, loaded.config.gateway.port)


def _port(host: str, port: int) -> Finding:
    from redraft.gateway.server import AddressUnavailable, bind

    try:
        bind(host, port).close()
    except AddressUnavailable as error:
        return Finding("fail", f"{host}:{port} cannot be listened on", str(error))
    return Finding("ok", f"{host}:{port} is free")


def _cpu_flags() -> set[str]:
    for line in _proc("cpuinfo"):
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(flags.split())
    return set()


def _proc(name: str) -> list[str]:
    """Lines of a file in Linux's /proc; none where there is no such thing."""
    try:
        return (PROC / name).read_text().splitlines()
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

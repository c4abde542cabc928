from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, expected_shapes, save
from redraft.engine.drafters.loading import content_id
from redraft.engine.types import DrafterVersion
from redraft.retrain.registry.record import VersionRecord
from redraft.retrain.registry.registry import Registry

TARGET = "7a" * 32

SHAPE = DFlashConfig(
    layers=1,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=8,
    vocab=16,
    rope_theta=10000.0,
    rms_eps=1e-5,
    context_length=64,
    block_size=4,
    mask_token_id=3,
    target_layers=4,
    feature_layers=(1,),
    target=TARGET,
)

Drafters = Callable[[int], Path]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote, only a killed machine does; and waiting for disks takes long."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    """Real checkpoints of a few hundred weights, one a seed."""
    torch.set_num_threads(1)

    def make(seed: int) -> Path:
        folder = tmp_path_factory.mktemp("drafter")
        save_random(folder, SHAPE, seed)
        return folder

    return make


def save_random(folder: Path, shape: DFlashConfig, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(size, generator=generator) * 0.2 for name, size in expected_shapes(shape).items()}
    save(folder, shape, tensors, card=f"# {seed}\n")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry", TARGET)


def record_of(folder: Path, **changes: Any) -> VersionRecord:
    fields: dict[str, Any] = {"target": TARGET, "origin": "trained", "why": "manual"}
    return VersionRecord(version=DrafterVersion("dflash", content_id(folder)), **(fields | changes))


def add(registry: Registry, folder: Path, **changes: Any) -> DrafterVersion:
    return registry.add(folder, record_of(folder, **changes), who="test")


def accepted(registry: Registry, folder: Path, **changes: Any) -> DrafterVersion:
    version = add(registry, folder, **changes)
    registry.decide(version, "accepted", who="gate", why="better")
    return version


CHANGES = ("os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree")
"""What Python's audit hooks tell of a process that changes files, beside opening one to write."""

KILLED = 17


def in_child(action: Callable[[], None], at: Callable[[int], None]) -> int:
    """Run ``action`` in a forked process, with ``at(n)`` before it changes a file for the n-th time; its status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0
    inside = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, inside
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and not inside:
            inside = True
            count += 1
            at(count)
            inside = False

    status = 1
    try:
        sys.addaudithook(hook)
        action()
        status = 0
    finally:
        os._exit(status)


def killed_everywhere(prepare: Callable[[], Callable[[], None]], check: Callable[[], None]) -> int:
    """Kill what ``prepare`` gives at each change of a file in turn, and ``check`` what is left; how many there were."""
    for step in range(1, 1000):

        def at(count: int, step: int = step) -> None:
            if count == step:
                os._exit(KILLED)

        status = in_child(prepare(), at)
        check()
        if status == 0:
            return step - 1
        assert status == KILLED
    raise AssertionError("it does not end")

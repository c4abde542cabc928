"""A published version serves a running engine's new answers, and is what a restarted one begins with."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.checkpoints import identity
from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig
from redraft.engine.drafters.loading import content_id
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.embedded.server import main
from redraft.engine.types import FLOOR, GREEDY, Commit, DrafterVersion, GenerationRequest, StopConditions
from redraft.retrain.publisher import Publisher, serving_drafter
from redraft.retrain.registry.pointers import FilePointerStore
from redraft.retrain.registry.record import VersionRecord
from redraft.retrain.registry.registry import Registry, open_registry

from .conftest import save_random

pytestmark = pytest.mark.integration

DEADLINE = 60

LONG = 250
"""Tokens of an answer that outlasts a swap."""

Start = Callable[[], Any]


@pytest.fixture
def registry(tiny_checkpoint: Path, tmp_path: Path) -> Registry:
    return open_registry(tmp_path / "registry", identity(tiny_checkpoint))


@pytest.fixture
def versions(registry: Registry, tiny_checkpoint: Path, tmp_path: Path) -> list[DrafterVersion]:
    """Two accepted drafters of random weights."""
    model = load_config(tiny_checkpoint)
    shape = DFlashConfig.for_target(model, registry.target, layers=1, block_size=4, mask_token_id=3)
    found = []
    for seed in range(2):
        folder = tmp_path / f"drafter-{seed}"
        save_random(folder, replace(shape, feature_layers=(1,)), seed)
        record = VersionRecord(
            version=DrafterVersion("dflash", content_id(folder)), target=registry.target, origin="trained", why="test"
        )
        found.append(registry.add(folder, record, who="test"))
        registry.decide(found[-1], "accepted", who="gate", why="better")
    return found


@pytest.fixture
def start(registry: Registry, tiny_checkpoint: Path, tmp_path: Path) -> Any:
    """Starts an engine process in place of the one before."""
    spawn = multiprocessing.get_context("spawn")
    config = EngineConfig(model=str(tiny_checkpoint), threads=1, kv_bytes=4 << 20)
    running: list[Any] = []

    def stop() -> None:
        for process in running:
            os.kill(process.pid, signal.SIGTERM)
            process.join(DEADLINE)
        running.clear()

    def begin() -> EmbeddedEngine:
        stop()
        socket = tmp_path / "engine.sock"
        running.append(spawn.Process(target=main, args=(config, socket, partial(serving_drafter, registry.root))))
        running[0].start()
        return EmbeddedEngine(socket)

    yield begin
    stop()


async def ready(engine: EmbeddedEngine) -> None:
    async with asyncio.timeout(DEADLINE):
        while not (await engine.health()).ready:
            await asyncio.sleep(0.05)


def answer(engine: EmbeddedEngine, name: str, tokens: int = 100) -> AsyncIterator[Commit]:
    stopping = StopConditions(max_tokens=tokens, ignore_eos=True)
    return engine.generate(
        GenerationRequest(request_id=name, prompt_ids=tuple(range(30)), stopping=stopping, sampling=GREEDY)
    )


async def collect(stream: AsyncIterator[Commit]) -> tuple[list[int], set[DrafterVersion | None]]:
    """An answer's tokens, and the versions that drafted for it; the floor may while a window grows."""
    commits = [commit async for commit in stream]
    drafted = {commit.verify_step.drafter for commit in commits if commit.verify_step and commit.verify_step.drafted}
    return [token for commit in commits for token in commit.token_ids], drafted - {FLOOR}


async def test_versions_swap_under_running_answers_and_a_restart_takes_the_published_one(
    registry: Registry, versions: list[DrafterVersion], start: Start
) -> None:
    engine = start()
    await ready(engine)
    publisher = Publisher(registry, FilePointerStore(registry.root), engine)
    first, second = versions
    plain, _ = await collect(answer(engine, "before", tokens=LONG))
    assert (await publisher.promote(first, "better", who="test")).in_force
    async with aclosing(answer(engine, "running", tokens=LONG)) as running:
        begun = [await anext(running) for _ in range(3)]
        assert (await publisher.promote(second, "better still", who="test")).in_force
        after, drafted_after = await collect(answer(engine, "after"))
        rest, drafted = await collect(running)
    assert [*(token for commit in begun for token in commit.token_ids), *rest] == plain
    assert after == plain[:100]
    assert drafted <= {first} and drafted_after == {second}
    async with aclosing(answer(engine, "undone", tokens=LONG)) as running:
        await anext(running)
        assert (await publisher.rollback("worse", who="test")).in_force
        _, drafted = await collect(running)
    assert drafted == {second}
    assert await collect(answer(engine, "back")) == (plain[:100], {first})
    await engine.close()

    engine = start()
    await ready(engine)
    assert (await engine.health()).drafter == first
    assert await collect(answer(engine, "restarted")) == (plain[:100], {first})
    await engine.close()


async def test_an_engine_whose_published_version_is_damaged_serves_and_says_so(
    registry: Registry, versions: list[DrafterVersion], start: Start
) -> None:
    publisher = Publisher(registry, FilePointerStore(registry.root), None)
    await publisher.promote(versions[0], "better", who="test")
    (registry.path(versions[0]) / "model.safetensors").unlink()
    engine = start()
    await ready(engine)
    health = await engine.health()
    assert health.drafter == FLOOR
    assert versions[0].id in health.detail and "has changed since it was added" in health.detail
    assert health.detail.endswith("ngram builtin serves")
    tokens, _ = await collect(answer(engine, "anyhow"))
    assert len(tokens) == 100
    await engine.close()

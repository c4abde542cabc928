"""The engine's process and its client, over a real socket, on the tiny checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.loading import content_id
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded import wire
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.embedded.server import Connection, EngineServer, build_core, main
from redraft.engine.embedded.threads import ThreadGovernor
from redraft.engine.protocol import EngineOverloaded, EngineUnavailable, RequestRefused
from redraft.engine.types import (
    Commit,
    DrafterPointer,
    DrafterVersion,
    GenerationRequest,
    SamplingParams,
    SpeculationScope,
    StopConditions,
)

pytestmark = pytest.mark.integration

DEADLINE = 60
NGRAM = NgramDrafter.version


class Process:
    """An engine process that can be killed and started again."""

    def __init__(self, folder: Path, socket: Path, **settings: Any) -> None:
        self.config = EngineConfig(model=str(folder), threads=1, kv_bytes=4 << 20, **settings)
        self.socket = socket
        self.start()

    def start(self) -> None:
        self.process = multiprocessing.get_context("spawn").Process(target=main, args=(self.config, self.socket))
        self.process.start()

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        self.process.join(DEADLINE)
        return self.process.exitcode


@pytest.fixture(scope="module")
def process(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    process = Process(tiny_checkpoint, tmp_path_factory.mktemp("run") / "engine.sock", max_running=2, max_waiting=2)
    yield process
    process.stop()


def request(request_id: str, max_tokens: int = 20, **overrides: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(range(30)),
        stopping=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        sampling=SamplingParams(temperature=0),
        **overrides,
    )


async def ready(engine: EmbeddedEngine) -> None:
    async with asyncio.timeout(DEADLINE):
        while not (await engine.health()).ready:
            await asyncio.sleep(0.05)


async def idle(engine: EmbeddedEngine) -> None:
    async with asyncio.timeout(DEADLINE):
        while (health := await engine.health()).running or health.waiting:
            await asyncio.sleep(0.01)


async def collect(stream: AsyncIterator[Commit]) -> list[int]:
    return [token async for commit in stream for token in commit.token_ids]


def with_engine(process: Process, scenario: Callable[[EmbeddedEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(process.socket)
        try:
            await ready(engine)
            async with asyncio.timeout(DEADLINE):
                await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def test_concurrent_requests_each_get_their_own_tokens(process: Process) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        alone = await collect(engine.generate(request("alone")))
        together = await asyncio.gather(
            *(collect(engine.generate(request(f"r{i}", max_tokens=5 * i))) for i in (1, 2, 3))
        )
        assert together == [alone[:5], alone[:10], alone[:15]]

    with_engine(process, scenario)


def test_whoever_has_an_answer_does_not_find_it_running(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_checkpoint), threads=1, kv_bytes=4 << 20)
    server = EngineServer(*build_core(config), tmp_path / "engine.sock", ThreadGovernor(1))
    running = []

    def post(self: EngineServer, connection: Connection, message: wire.Commits) -> None:
        running.append(self._health.running)
        if message.commits[0].finish_reason:
            self._inbox.put(None)

    monkeypatch.setattr(EngineServer, "_post", post)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    server._inbox.put((Connection(Mock()), wire.Submit(request("r", max_tokens=2, speculation=False))))
    server.run()
    assert running == [1, 0]


def test_closing_the_iterator_frees_the_place_before_and_after_the_first_token(process: Process) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        async with aclosing(engine.generate(request("a", max_tokens=480))) as stream:
            await anext(stream)
        await idle(engine)
        task = asyncio.create_task(collect(engine.generate(request("b", max_tokens=480))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(engine)

    with_engine(process, scenario)


def test_a_client_that_vanishes_frees_its_places(process: Process) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        _, writer = await asyncio.open_unix_connection(str(process.socket))
        writer.write(wire.encode(wire.Submit(request("ghost", max_tokens=480))))
        await writer.drain()
        async with asyncio.timeout(DEADLINE):
            while not (await engine.health()).running:
                await asyncio.sleep(0.005)
        writer.transport.abort()
        await idle(engine)

    with_engine(process, scenario)


def test_garbage_on_the_socket_ends_that_connection_only(process: Process) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        for garbage in (b"\xff" * 64, (5).to_bytes(4, "big") + b"abcde", b"\x00"):
            reader, writer = await asyncio.open_unix_connection(str(process.socket))
            writer.write(garbage)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert len(await collect(engine.generate(request("after")))) == 20

    with_engine(process, scenario)


def test_refusals_and_overload_arrive_as_their_own_errors(process: Process) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        with pytest.raises(RequestRefused, match="do not fit the context") as refused:
            await collect(engine.generate(request("long", max_tokens=4000)))
        assert refused.value.param == "max_tokens"
        streams = [asyncio.create_task(collect(engine.generate(request(f"q{i}", max_tokens=400)))) for i in range(12)]
        results = await asyncio.gather(*streams, return_exceptions=True)
        turned_away = [r for r in results if isinstance(r, EngineOverloaded)]
        assert turned_away
        assert all(len(r) == 400 for r in results if isinstance(r, list))
        assert len(turned_away) + sum(isinstance(r, list) for r in results) == 12

    with_engine(process, scenario)


def test_speculation_and_drafters_are_switched_over_the_socket(process: Process) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        await engine.set_speculation(SpeculationScope("all"), on=False)
        assert not (await engine.health()).speculation
        await engine.set_speculation(SpeculationScope("all"), on=True)
        assert (await engine.health()).speculation
        capabilities = await engine.capabilities()
        await engine.load_drafter(NGRAM, Path("/nowhere"))
        await engine.activate(DrafterPointer(target=capabilities.target, serving=NGRAM))
        with pytest.raises(RequestRefused, match="dflash v1"):
            await engine.activate(DrafterPointer(target=capabilities.target, serving=DrafterVersion("dflash", "v1")))

    with_engine(process, scenario)


@pytest.fixture(scope="module")
def drafters(make_dflash: Callable[..., Path], tiny_checkpoint: Path) -> dict[DrafterVersion, Path]:
    folders = [make_dflash(tiny_checkpoint, seed=seed) for seed in range(3)]
    return {DrafterVersion("dflash", content_id(folder)): folder for folder in folders}


def test_sessions_go_on_while_drafters_are_loaded_and_swapped(
    process: Process, drafters: dict[DrafterVersion, Path]
) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        target = (await engine.capabilities()).target
        expected = await collect(engine.generate(request("alone", max_tokens=100, speculation=False)))
        order = list(drafters.items()) * 2
        started = [asyncio.Event() for _ in order]

        async def answer(name: int) -> list[Commit]:
            commits = []
            async for commit in engine.generate(request(str(name), max_tokens=100)):
                started[name].set()
                commits.append(commit)
            return commits

        running: list[asyncio.Task[list[Commit]]] = []
        for token, (version, folder) in enumerate(order):
            await engine.load_drafter(version, folder)
            await engine.load_drafter(version, folder)
            pointer = DrafterPointer(target=target, serving=version, previous=order[token - 1][0], token=token)
            await engine.activate(pointer)
            await engine.activate(pointer)
            assert (await engine.health()).drafter == version
            if token > 1:
                await running[token - 2]
            running.append(asyncio.create_task(answer(token)))
            await started[token].wait()
        for task, (version, _) in zip(running, order, strict=True):
            commits = await task
            assert [token for commit in commits for token in commit.token_ids] == expected
            assert {commit.verify_step.drafter for commit in commits if commit.verify_step} - {NGRAM} == {version}
        assert (await engine.capabilities()).hot_swap

    with_engine(process, scenario)


def test_a_drafter_that_cannot_be_loaded_or_activated_is_refused_in_words_and_changes_nothing(
    process: Process, drafters: dict[DrafterVersion, Path], tmp_path: Path
) -> None:
    (version, folder), *_ = drafters.items()
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    other = DrafterVersion("dflash", "0123456789abcdef")

    async def scenario(engine: EmbeddedEngine) -> None:
        before = await engine.health()
        for wanted, path, message in (
            (DrafterVersion("dflash", content_id(broken)), broken, "model.safetensors"),
            (other, folder, f"holds drafter {version.id}, not {other.id}"),
            (other, tmp_path / "nowhere", "is no drafter checkpoint"),
            (other, weights, "is no drafter checkpoint"),
            (DrafterVersion("eagle9", "x"), folder, "of kind eagle9; this engine serves dflash, eagle3, mtp and ngram"),
        ):
            with pytest.raises(RequestRefused, match=message):
                await engine.load_drafter(wanted, path)
        target = (await engine.capabilities()).target
        with pytest.raises(RequestRefused, match="is not loaded"):
            await engine.activate(DrafterPointer(target=target, serving=other, token=100))
        assert await engine.health() == before
        assert len(await collect(engine.generate(request("after")))) == 20

    with_engine(process, scenario)


def test_costs_are_known_from_the_start_and_of_a_loaded_drafter_once_there_is_nothing_to_run(
    process: Process, drafters: dict[DrafterVersion, Path]
) -> None:
    *_, (version, folder) = drafters.items()

    async def scenario(engine: EmbeddedEngine) -> None:
        table = await engine.costs()
        assert "builtin" in table.draft
        assert table.verify.at(3, 100) > 0
        await engine.load_drafter(version, folder)
        async with asyncio.timeout(DEADLINE):
            while version.id not in (await engine.costs()).draft:
                await asyncio.sleep(0.01)

    with_engine(process, scenario)


def test_a_registered_drafter_serves_from_the_start(
    tiny_checkpoint: Path, drafters: dict[DrafterVersion, Path]
) -> None:
    (version, folder), *_ = drafters.items()
    asked = []

    def serving(identity: str) -> tuple[DrafterVersion, Path]:
        asked.append(identity)
        return version, folder

    config = EngineConfig(model=str(tiny_checkpoint), threads=1, kv_bytes=4 << 20)
    core, capabilities = build_core(config, serving)
    assert core.drafter is not None
    assert (core.drafter.version, core.versions.fault, asked) == (version, "", [capabilities.target])


def test_a_registered_drafter_that_cannot_be_loaded_is_told_and_the_configured_one_serves(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(identity: str) -> tuple[DrafterVersion, Path]:
        return DrafterVersion("dflash", "gone"), tmp_path / "gone"

    def faulty(identity: str) -> tuple[DrafterVersion, Path]:
        raise OSError("the registry's disk is gone")

    for serving, words in ((gone, "gone is no drafter checkpoint"), (faulty, "OSError: the registry's disk is gone")):
        caplog.clear()
        config = EngineConfig(model=str(tiny_checkpoint), threads=1, kv_bytes=4 << 20, drafter="ngram")
        server = EngineServer(*build_core(config, serving), tmp_path / "engine.sock", ThreadGovernor(1))
        assert server._health.drafter == NGRAM
        assert server._health.ready
        assert words in server._health.detail
        assert "should serve, but cannot" in server._health.detail
        assert server._health.detail.endswith("ngram builtin serves")
        told = [record for record in caplog.records if words in record.getMessage()]
        assert [(record.getMessage(), record.exc_info) for record in told] == [(server._health.detail, None)]
        activate = wire.Activate(0, DrafterPointer(target=server._capabilities.target, serving=NGRAM))
        server._handle(Connection(Mock()), activate)
        assert server._health.detail == ""
        server._io.close()


def test_a_bad_drafter_is_told_before_the_target_is_loaded(
    tiny_checkpoint: Path, drafters: dict[DrafterVersion, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, folder), *_ = drafters.items()
    lacking = Path(shutil.copytree(folder, tmp_path / "lacking"))
    (lacking / "model.safetensors").unlink()
    monkeypatch.setattr("redraft.engine.embedded.server.Target", Mock(side_effect=AssertionError("loaded")))
    for drafter, message in (("ngrams", "is neither none, ngram"), (str(lacking), "neither model.safetensors nor")):
        with pytest.raises(CheckpointError, match=message):
            build_core(EngineConfig(model=str(tiny_checkpoint), drafter=drafter))


def test_a_file_where_the_socket_has_to_be_ends_the_start_and_is_left_alone(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "engine.sock"
    file.write_text("precious")
    process = Process(tiny_checkpoint, file)
    process.process.join(DEADLINE)
    assert process.process.exitcode == 1
    assert file.read_text() == "precious"


def test_a_killed_engine_fails_its_requests_by_name_and_is_found_again(tiny_checkpoint: Path, tmp_path: Path) -> None:
    process = Process(tiny_checkpoint, tmp_path / "engine.sock")

    async def scenario(engine: EmbeddedEngine) -> None:
        with pytest.raises(EngineUnavailable, match="restarts by itself"):
            async for _ in engine.generate(request("cut", max_tokens=480)):
                if process.process.is_alive():
                    process.stop(signal.SIGKILL)
        assert not (await engine.health()).ready
        with pytest.raises(EngineUnavailable, match="not running"):
            await collect(engine.generate(request("too early")))
        process.start()
        await ready(engine)
        assert len(await collect(engine.generate(request("again")))) == 20

    try:
        with_engine(process, scenario)
    finally:
        assert process.stop() == 0
    assert not process.socket.exists()

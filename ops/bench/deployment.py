"""An engine and a gateway in processes of their own, for benchmarks and tests."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.checkpoints import resolve
from redraft.engine.config import EngineConfig
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.embedded.server import main
from redraft.gateway.app import create_app
from redraft.gateway.config import GatewayConfig
from redraft.gateway.server import bind, serve

START_SECONDS = 120


@asynccontextmanager
async def running(
    config: EngineConfig, engine_main: Callable[[EngineConfig, Path], None] = main
) -> AsyncIterator[tuple[EmbeddedEngine, str]]:
    """A client of the engine's socket and the gateway's URL, on a free loopback port."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0) as listener:
        engine_socket = Path(folder) / "engine.sock"
        processes = [
            spawn.Process(target=engine_main, args=(config, engine_socket)),
            spawn.Process(target=_gateway, args=(config.model, engine_socket, listener)),
        ]
        for process in processes:
            process.start()
        engine = EmbeddedEngine(engine_socket)
        try:
            async with asyncio.timeout(START_SECONDS):
                while not (await engine.health()).ready:
                    if not all(process.is_alive() for process in processes):
                        raise RuntimeError("the engine or the gateway ended while starting; see its message above")
                    await asyncio.sleep(0.1)
            yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await engine.close()
            for process in reversed(processes):
                process.terminate()
                process.join()


def _gateway(model: str, engine_socket: Path, listener: socket.socket) -> None:
    app = create_app(GatewayConfig(port=0), EmbeddedEngine(engine_socket), ChatEncoder.from_folder(resolve(model)))
    serve(app, listener)

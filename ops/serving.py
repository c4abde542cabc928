"""Composes a deployment: which processes it has, how they are started, and what each of them runs."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Literal

import httpx

from redraft.gateway.server import AddressUnavailable, bind
from redraft.ops.config import LoadedConfig, RedraftConfig, dump, load_config
from redraft.ops.deployment import Deployment, State
from redraft.ops.errors import CliError
from redraft.ops.feedback import feedback_folder, start_recorder
from redraft.ops.processes import identify
from redraft.ops.supervisor import Service, Supervisor

PROGRAM = (sys.executable, "-m", "redraft.ops.cli")

PROBE_SECONDS = 5.0
"""For an answer to a probe; longer than the gateway waits for its engine."""


def serve(loaded: LoadedConfig, deployment: Deployment, report: Callable[[State], None]) -> None:
    """Run a deployment in the foreground until SIGTERM, SIGINT or SIGHUP; the caller holds its lock.

    Raises:
        CliError: it could not be started.
    """
    me = identify(os.getpid())
    if me is None:
        raise CliError("a deployment needs Linux's /proc, which is not mounted here")
    _check_folders(loaded.config)
    engine_socket = deployment.socket(loaded.config.engine.socket)
    engine_socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock_socket(engine_socket):
        gateway = loaded.config.gateway
        listener = _listen(gateway.host, gateway.port)
        port = listener.getsockname()[1]
        effective = loaded.config.model_copy(
            update={
                "gateway": gateway.model_copy(update={"port": port}),
                "engine": loaded.config.engine.model_copy(update={"socket": engine_socket}),
            }
        )
        deployment.effective_config.write_text(dump(effective))
        first = [listener]
        services = [
            Service("engine", (*PROGRAM, "_engine", str(deployment.effective_config)), grace=2),
            Service(
                "gateway",
                (*PROGRAM, "_gateway", str(deployment.effective_config)),
                grace=6,
                listen=lambda: first.pop() if first else _listen(gateway.host, port),
            ),
        ]
        state = State(
            supervisor=me,
            phase="starting",
            url=_url(gateway.host, port),
            config=dump(loaded.config),
            config_path=str(loaded.path.resolve()) if loaded.path else None,
        )
        asyncio.run(_supervise(services, deployment, state, report))


async def _supervise(
    services: list[Service], deployment: Deployment, state: State, report: Callable[[State], None]
) -> None:
    async with httpx.AsyncClient(base_url=state.url, timeout=PROBE_SECONDS, trust_env=False) as client:
        supervisor = Supervisor(services, deployment, state, partial(_silent_service, client), report)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, supervisor.stop)
        await supervisor.run()


async def _silent_service(client: httpx.AsyncClient) -> Literal["engine", "gateway"] | None:
    """Which process does not answer: a gateway that does says with 503 that the engine does not."""
    try:
        status = (await client.get("/ready")).status_code
    except httpx.HTTPError:
        return "gateway"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "engine"
    return None if status == HTTPStatus.OK else "gateway"


def _check_folders(config: RedraftConfig) -> None:
    """Refuse to keep things where something else than a folder is; a folder that only fails later stops nothing."""
    kept = {"retrain.folder": config.retrain.home}
    if config.feedback.enabled:
        kept["feedback.folder"] = feedback_folder(config)
    for key, folder in kept.items():
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise CliError(f"{key} is {folder}, but {nearest} is no folder; name one, which is made if need be")


def _lock_socket(engine_socket: Path) -> BinaryIO:
    """Hold the engine's socket for one deployment; what holds it is an open file, so it goes with its process."""
    lock = engine_socket.with_name(engine_socket.name + ".lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise CliError(
            f"{engine_socket} is another running deployment's engine socket; "
            "set engine.socket to a path of its own, or leave it out"
        ) from None
    return lock


def _listen(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except AddressUnavailable as error:
        raise CliError(str(error)) from None


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_engine(config_path: Path) -> None:
    """The engine process."""
    config, engine_socket = _effective(config_path)
    try:
        from redraft.engine.drafters.loading import KINDS
        from redraft.engine.embedded.server import main
        from redraft.retrain.publisher import serving_drafter
    except ModuleNotFoundError as error:
        raise CliError(f"the embedded engine needs the engine extra ({error}): pip install 'redraft[engine]'") from None
    if config.engine.drafter in KINDS:
        main(config.engine, engine_socket, partial(serving_drafter, config.retrain.registry))
    else:
        main(config.engine, engine_socket)


def run_gateway(config_path: Path, listen_fd: int) -> None:
    """The gateway process, serving on a socket that the supervisor bound."""
    from redraft.engine.chat.encoding import ChatEncoder
    from redraft.engine.checkpoints import resolve
    from redraft.engine.embedded.client import EmbeddedEngine
    from redraft.gateway.app import create_app
    from redraft.gateway.server import serve

    config, engine_socket = _effective(config_path)
    model = resolve(config.engine.model)
    chat = ChatEncoder.from_folder(model)
    recorder = start_recorder(config, model, chat.tokenizer)
    app = create_app(config.gateway, EmbeddedEngine(engine_socket), chat, recorder)
    serve(app, socket.socket(fileno=listen_fd))


def _effective(path: Path) -> tuple[RedraftConfig, Path]:
    """What the supervisor wrote for its processes: port and socket are settled in it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = load_config(path, {}).config
    assert config.engine.socket is not None
    return config, config.engine.socket

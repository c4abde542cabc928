"""A deployment of the demo's own: its configuration, state and data lie in one folder and end with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from redraft.engine.checkpoints import served_name
from redraft.ops.config import RedraftConfig, load_config
from redraft.ops.deployment import Deployment
from redraft.ops.errors import CliError
from redraft.ops.serving import PROGRAM
from redraft.retrain.finetune import FINETUNE

START_SECONDS = 300.0
STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Deployed:
    """A running deployment; its processes and commands see ``environment`` and nothing of the user's own state."""

    url: str
    model: str
    config_path: Path
    config: RedraftConfig
    environment: Mapping[str, str]
    deployment: Deployment

    @property
    def socket(self) -> Path:
        """The engine's."""
        found = load_config(self.deployment.effective_config, {}).config.engine.socket
        assert found is not None
        return found

    def command(self, *arguments: str) -> tuple[str, ...]:
        return (*PROGRAM, *arguments, "--config", str(self.config_path))


@asynccontextmanager
async def deployed(
    folder: Path, settings: Mapping[str, Mapping[str, Any]], recipe: Mapping[str, Any]
) -> AsyncIterator[Deployed]:
    """Run a deployment with ``settings`` in ``folder``, whose path must leave room for a socket's name.

    Its candidates are trained by Redraft's own recipe with the keys of ``recipe`` instead.

    It is stopped, by its supervisor's own orderly way, when the block ends for whatever reason. Raises `CliError` if it
    does not start.
    """
    sections = {name: dict(values) for name, values in settings.items()}
    sections.setdefault("gateway", {})["port"] = 0
    for name in ("feedback", "retrain"):
        sections.setdefault(name, {})["folder"] = str(folder / name)
    sections["retrain"]["recipe"] = str(folder / "recipe.yaml")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(FINETUNE.read_text()) | dict(recipe)))
    path = folder / "redraft.yaml"
    path.write_text(yaml.safe_dump(sections))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("REDRAFT_", "XDG_RUNTIME"))}
    environment = {**kept, "XDG_STATE_HOME": str(folder), "PYTHONSAFEPATH": "1"}
    config = load_config(path, {}).config
    log = (folder / "supervisor.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "serve", "--config", str(path)),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        deployment, url = await _ready(folder, process)
        yield Deployed(url, served_name(config.engine.model), path, config, environment, deployment)
    finally:
        await asyncio.shield(_stopped(process))
        log.close()


async def _stopped(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _ready(folder: Path, process: asyncio.subprocess.Process) -> tuple[Deployment, str]:
    deployments = folder / "redraft" / "deployments"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    while process.returncode is None and loop.time() < deadline:
        for each in sorted(deployments.iterdir()) if deployments.is_dir() else ():
            state = Deployment(each).read()
            if state is not None and state.phase == "ready":
                return Deployment(each), state.url
        await asyncio.sleep(0.1)
    lines = (folder / "supervisor.log").read_text(errors="replace").splitlines()
    why = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    raise CliError(f"the demo's own deployment did not start: {why}")

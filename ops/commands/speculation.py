"""The kill switch: speculation off and on while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.types import SpeculationScope
from redraft.ops.commands.options import ConfigPath, running_state
from redraft.ops.config import load_config
from redraft.ops.deployment import load
from redraft.ops.errors import CliError, UsageError

ENGINE_SECONDS = 10.0
"""For the pass that runs to end; the switch comes between two."""


def speculation(
    switch: Annotated[Literal["on", "off"], typer.Argument(help="Which way.")],
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's requests.")] = None,
    request: Annotated[str | None, typer.Option(help="Only this running request, by its completion id.")] = None,
    config: ConfigPath = None,
) -> None:
    """Turn speculation off or on at once, for everything, one tenant or one running request.

    Answers do not change, only how fast they come. A restarted engine speculates again.
    """
    if tenant is not None and request is not None:
        raise UsageError("--tenant and --request exclude each other")
    running_state(config)
    _, deployment = load(config)
    in_force = load_config(deployment.effective_config, {}).config
    assert in_force.engine.socket is not None
    scope = SpeculationScope("all")
    if tenant is not None:
        scope = SpeculationScope("tenant", tenant)
    elif request is not None:
        scope = SpeculationScope("request", request)
    asyncio.run(_switch(in_force.engine.socket, scope, on=switch == "on"))
    whom = f"{scope.kind} {scope.name}" if scope.name else "every request"
    print(f"Speculation is {switch} for {whom}")


async def _switch(socket: Path, scope: SpeculationScope, *, on: bool) -> None:
    engine = EmbeddedEngine(socket)
    try:
        async with asyncio.timeout(ENGINE_SECONDS):
            await engine.set_speculation(scope, on)
    except TimeoutError:
        raise CliError("the engine does not answer; look at: redraft status") from None
    finally:
        await engine.close()

"""A deployment's drafter versions and who serves, as every command that looks at or changes them sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redraft.engine.checkpoints import identity, resolve
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.protocol import EngineError
from redraft.engine.types import DrafterPointer, Health
from redraft.ops.config import RedraftConfig
from redraft.ops.deployment import in_force
from redraft.retrain.registry.errors import RegistryError
from redraft.retrain.registry.pointers import FilePointerStore
from redraft.retrain.registry.record import Entered, State
from redraft.retrain.registry.registry import Registry, open_registry

if TYPE_CHECKING:
    from redraft.retrain.publisher import Published, Publisher

TRAINED = ("dflash", "eagle3", "mtp")
"""Values of ``engine.drafter`` with which an engine takes the pointer's version when it starts."""

HEALTH_SECONDS = 2.0


@dataclass(frozen=True)
class Shelf:
    """A deployment's versions and who serves; ``engine`` is the socket of one that runs."""

    config: RedraftConfig
    registry: Registry
    pointers: FilePointerStore
    pointer: DrafterPointer | None
    engine: Path | None

    def state(self, entered: Entered) -> State:
        """As the pointer has it: history may lag behind it."""
        if self.pointer is None:
            return entered.state
        if entered.version == self.pointer.serving:
            return "serving"
        return "retired" if entered.state == "serving" else entered.state

    def damaged(self) -> dict[str, str]:
        """What is wrong with records, and what to do about it, by version id."""
        pointed = (self.pointer.serving, self.pointer.previous) if self.pointer else ()
        return self.registry.damaged(*filter(None, pointed))

    async def publishing(self, change: Callable[[Publisher], Awaitable[Published]]) -> Published:
        """What came of a change that a publisher made, with the engine if one runs."""
        from redraft.retrain.publisher import Publisher

        engine = EmbeddedEngine(self.engine) if self.engine else None
        try:
            return await change(Publisher(self.registry, self.pointers, engine))
        finally:
            if engine:
                await engine.close()


def open_shelf(path: Path | None) -> Shelf:
    """Of the deployment as it runs, or as it would."""
    config, running = in_force(path)
    registry = open_registry(config.retrain.registry, identity(resolve(config.engine.model)))
    pointers = FilePointerStore(registry.root)
    pointer = pointers.load(registry.target)
    return Shelf(config, registry, pointers, pointer, config.engine.socket if running else None)


def out_of_step(config: RedraftConfig) -> str:
    """Which version should serve, which does and why, where a running engine's is not the pointer's; else empty."""
    if config.engine.socket is None:
        return ""
    try:
        health, target = asyncio.run(_ask(config.engine.socket))
        if health.detail:
            return health.detail
        pointer = FilePointerStore(config.retrain.registry).load(target)
    except (TimeoutError, EngineError):
        return ""
    except RegistryError as error:
        return str(error)
    if pointer is None or pointer.serving == health.drafter:
        return ""
    serves = f"{health.drafter.kind} {health.drafter.id}" if health.drafter else "no drafter"
    drafter, version = config.engine.drafter, pointer.serving.id
    why = (
        f"it has not been told; tell it: redraft drafters promote {version}"
        if drafter in TRAINED
        else f"engine.drafter is {drafter}, which comes first when it starts; set it to one of {', '.join(TRAINED)} to "
        "take versions"
    )
    return f"version {version} should serve by the pointer, but the engine serves {serves}: {why}"


async def _ask(socket: Path) -> tuple[Health, str]:
    """How an engine is, and the identity of its target."""
    engine = EmbeddedEngine(socket)
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            return await engine.health(), (await engine.capabilities()).target
    finally:
        await engine.close()

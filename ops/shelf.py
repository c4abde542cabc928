"""A deployment's drafter versions and who serves, as every command that looks at or changes them sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redraft.engine.checkpoints import identity, resolve
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.types import DrafterPointer
from redraft.ops.config import RedraftConfig
from redraft.ops.deployment import in_force
from redraft.retrain.registry.pointers import FilePointerStore
from redraft.retrain.registry.record import Entered, State
from redraft.retrain.registry.registry import Registry, open_registry

if TYPE_CHECKING:
    from redraft.retrain.publisher import Published, Publisher


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

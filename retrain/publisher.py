"""Putting a drafter version into service, and taking it back.

The serving pointer is the truth; the registry's history says why it changed, and the engine follows it. So the order
is: load, which disturbs nobody and refuses what cannot be loaded; compare-and-set; history; activate. A process that
ends in between leaves the pointer as the truth: history is made to agree by the next that publishes, and the engine
takes the pointer's version when it is told again or starts. A pointer older than what history or the engine know of was
restored by somebody: it is the truth all the same, under a new token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from redraft.engine.protocol import Engine, EngineError, PointerStore
from redraft.engine.types import FLOOR, DrafterPointer, DrafterVersion, Health
from redraft.retrain.registry.errors import RegistryError
from redraft.retrain.registry.pointers import FilePointerStore
from redraft.retrain.registry.record import Entered
from redraft.retrain.registry.registry import Registry, add_version_zero

T = TypeVar("T")

SERVABLE = ("accepted", "retired", "serving")
"""States in which a version may serve without force."""

HEALTH_SECONDS = 10.0
LOAD_SECONDS = 120.0
ACTIVATE_SECONDS = 30.0
"""How long an engine may take to say how it is, to load a version, and to turn to it."""


class Published(Struct, frozen=True, kw_only=True):
    """What came of it: the pointer in force, whether the engine serves by it, and that in words."""

    pointer: DrafterPointer
    in_force: bool
    detail: str


class Publisher:
    """Changes who serves the registry's target; ``engine`` None where none runs.

    Raises `RegistryError` if nothing was changed, and says why.
    """

    def __init__(self, registry: Registry, pointers: PointerStore, engine: Engine | None) -> None:
        self._registry = registry
        self._pointers = pointers
        self._engine = engine

    async def promote(
        self,
        version: DrafterVersion,
        why: str,
        *,
        who: str,
        force: bool = False,
        instead_of: DrafterVersion | None = None,
    ) -> Published:
        """Let an accepted version serve; the one that serves already is only told to the engine again.

        ``force`` takes one that the gate did not accept, or that was rolled back, and records that a person did.
        ``instead_of`` is the version that it was judged against: nothing is done if another serves by now.
        """
        self._registry.get(version)
        pointer, health = await self._settle()
        if instead_of not in (None, pointer.serving) and version != pointer.serving:
            raise RegistryError(
                f"version {version.id} was judged against {instead_of.id}, but {pointer.serving.id} serves by now; it "
                f"was not promoted. To have it serve all the same: {_promoting(self._registry.get(version))}"
            )
        entered = self._registry.get(version)
        if entered.state not in SERVABLE:
            if not force:
                raise RegistryError(
                    f"version {version.id} is {entered.state}, not accepted; it does not serve unless a person forces "
                    f"it: {_promoting(entered)}"
                )
            self._registry.force(version, who=who, why=why)
        missing = await self._load(version, health)
        if version == pointer.serving:
            return await self._activate(pointer, missing, f"version {version.id} serves already")
        changed = replace(pointer, serving=version, previous=pointer.serving, canary=None, token=pointer.token + 1)
        await self._set(pointer.token, changed, f"version {version.id} was not promoted")
        self._registry.follow(changed, who=who, why=why, left="retired")
        return await self._activate(changed, missing, f"version {version.id} serves instead of {pointer.serving.id}")

    async def rollback(self, why: str, *, who: str, to: DrafterVersion | None = None) -> Published:
        """Let the version serve again that served before the present one, or ``to``, which served once.

        What is rolled back does not come back by a second rollback: that goes one further back.
        """
        pointer, health = await self._settle()
        back = to or pointer.previous
        if back is None:
            raise RegistryError(f"nothing served before {pointer.serving.id}; there is nothing to roll back to")
        if back == pointer.serving:
            raise RegistryError(f"version {back.id} serves already; nothing was rolled back")
        entered = self._registry.known(back)
        if entered and entered.state != "retired":
            raise RegistryError(
                f"version {back.id} is {entered.state}; a rollback goes to one that served and was not rolled back "
                f"itself. To have this one serve all the same: {_promoting(entered)}{self._other_ways_back()}"
            )
        missing = await self._load(back, health)
        previous = entered.replaced if entered and entered.replaced != pointer.serving else None
        changed = replace(pointer, serving=back, previous=previous, canary=None, token=pointer.token + 1)
        await self._set(pointer.token, changed, "nothing was rolled back")
        self._registry.follow(
            changed, who=who, why=f"version {pointer.serving.id} was rolled back: {why}", left="rolled_back"
        )
        return await self._activate(changed, missing, f"version {back.id} serves again instead of {pointer.serving.id}")

    async def _settle(self) -> tuple[DrafterPointer, Health]:
        """The pointer and how the engine is; no token is known that is newer than the pointer's.

        The pointer is made if there was none, and recorded if whoever changed it was stopped before.
        """
        target = self._registry.target
        health = await _asked(self._engine.health(), HEALTH_SECONDS) if self._engine else Health(ready=False)
        newest = max(self._registry.token, health.token)
        pointer = await self._pointers.read(target)
        why = "found in the pointer: whoever changed it has not said why"
        if pointer is None or pointer.token < newest:
            if pointer is None:
                why = "there was no pointer: version zero serves"
                settled = DrafterPointer(target=target, serving=add_version_zero(self._registry), token=newest + 1)
            else:
                why = f"an older pointer was restored: {pointer.token}, where {newest} had been reached"
                settled = replace(pointer, token=newest + 1)
            await self._set(pointer.token if pointer else 0, settled, "nothing was changed")
            pointer = settled
        self._registry.follow(pointer, who="redraft", why=why, left="retired")
        return pointer, health

    async def _load(self, version: DrafterVersion, health: Health) -> str:
        """Make an engine that runs ready for a version; else why none was. The version can be had either way."""
        path = None if version == FLOOR else self._registry.path(version)
        if self._engine is None:
            return "no engine is running: it takes this version when it starts"
        if not health.ready:
            return f"{health.detail or 'the engine is not ready'}: promote it again once it is up, to be sure"
        if path:
            await _asked(self._engine.load_drafter(version, path), LOAD_SECONDS)
        return ""

    async def _set(self, token: int, pointer: DrafterPointer, undone: str) -> None:
        if not await self._pointers.compare_and_set(token, pointer):
            present = await self._pointers.read(pointer.target)
            serves = self._serves(present) if present else "the pointer was moved away"
            raise RegistryError(f"{undone}: somebody else changed the serving pointer at the same time, and {serves}")

    def _serves(self, pointer: DrafterPointer) -> str:
        """Who serves by a pointer, and by whose choice as far as history knows."""
        entered = self._registry.known(pointer.serving)
        last = entered.history[-1] if entered else None
        chosen = f", chosen by {last.who}: {last.why}" if last and last.token == pointer.token else ""
        return f"version {pointer.serving.id} serves{chosen}"

    def _other_ways_back(self) -> str:
        ids = [entered.version.id for entered in self._registry.all() if entered.state == "retired"]
        return f"; or roll back with --to {' or '.join(ids)}" if ids else ""

    async def _activate(self, pointer: DrafterPointer, missing: str, done: str) -> Published:
        if self._engine is None or missing:
            return Published(pointer=pointer, in_force=False, detail=f"{done}; {missing}")
        try:
            await _asked(self._engine.activate(pointer), ACTIVATE_SECONDS)
        except RegistryError as error:
            present = await self._pointers.read(pointer.target)
            if present and present.token > pointer.token:
                detail = (
                    f"{done}, but not for long: somebody else changed the pointer at the same time, and "
                    f"{self._serves(present)}"
                )
                return Published(pointer=present, in_force=False, detail=detail)
            detail = f"{done} by the pointer, but the engine does not follow yet: {error}; promote it again or restart"
            return Published(pointer=pointer, in_force=False, detail=detail)
        return Published(pointer=pointer, in_force=True, detail=done)


def _promoting(entered: Entered) -> str:
    """The command that has a version serve."""
    return f"redraft drafters promote {entered.version.id}{'' if entered.state in SERVABLE else ' --force'}"


async def _asked(call: Awaitable[T], seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise RegistryError(f"the engine did not answer within {seconds:g} s") from None
    except EngineError as error:
        raise RegistryError(f"the engine says: {error}") from error


def serving_drafter(root: Path, target: str) -> tuple[DrafterVersion, Path] | None:
    """What the pointer under ``root`` says serves a target, for an engine's start.

    None where it names no checkpoint. Raises `DrafterError` if the version that it names cannot be had.
    """
    from redraft.engine.drafters.checkpoint import DrafterError

    try:
        pointer = FilePointerStore(root).load(target)
        if pointer is None or pointer.serving == FLOOR:
            return None
        return pointer.serving, Registry(root, target).path(pointer.serving)
    except RegistryError as error:
        raise DrafterError(str(error)) from error

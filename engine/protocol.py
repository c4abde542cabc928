"""What the gateway asks of an engine, and what anybody asks of the serving pointer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Protocol

from redraft.engine.policy.cost import CostTable
from redraft.engine.types import (
    Capabilities,
    Commit,
    DrafterPointer,
    DrafterVersion,
    GenerationRequest,
    Health,
    SpeculationScope,
)


class EngineError(Exception):
    """An engine could not do what was asked; the message is for the person who asked."""


class RequestRefused(EngineError):
    """The request itself is wrong; ``param`` names the offending field where one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineOverloaded(EngineError):
    """The queue is full; the same request may pass later."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, is still loading, or died under the request."""


class Engine(Protocol):
    """Generates token ids; rendering, text and tool calls belong to its caller."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit]:
        """Yield commits of all choices as they happen; closing the generator aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Free everything a request holds; unknown or finished ids are ignored."""
        ...

    async def load_drafter(self, version: DrafterVersion, path: Path) -> None:
        """Make a version ready to activate, without disturbing running requests."""
        ...

    async def activate(self, pointer: DrafterPointer) -> None:
        """Serve new sequences as the pointer says; running ones follow the engine's swap rule."""
        ...

    async def set_speculation(self, scope: SpeculationScope, on: bool) -> None:
        """Turn speculation on or off at once; answers do not change."""
        ...

    async def capabilities(self) -> Capabilities: ...

    async def health(self) -> Health: ...

    async def costs(self) -> CostTable:
        """What passes cost on this engine, for the drafters that it has loaded."""
        ...

    async def close(self) -> None: ...


class PointerStore(Protocol):
    """One drafter pointer per target; retraining writes it, gateway and engine only read."""

    async def read(self, target: str) -> DrafterPointer | None: ...

    async def compare_and_set(self, expected_token: int, pointer: DrafterPointer) -> bool:
        """Write ``pointer`` if the stored token is still ``expected_token``; False if somebody else was first."""
        ...

    def watch(self, target: str) -> AsyncIterator[DrafterPointer]:
        """Yield the present pointer and then every change."""
        ...

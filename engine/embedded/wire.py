"""Messages between the embedded engine and its clients: msgpack behind a 4-byte length, over a Unix socket."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

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

MAX_MESSAGE_BYTES = 64 << 20


class Submit(Struct, frozen=True, tag=True):
    request: GenerationRequest


class Abort(Struct, frozen=True, tag=True):
    request_id: str


class LoadDrafter(Struct, frozen=True, tag=True):
    call: int
    version: DrafterVersion
    path: str


class Activate(Struct, frozen=True, tag=True):
    call: int
    pointer: DrafterPointer


class SetSpeculation(Struct, frozen=True, tag=True):
    call: int
    scope: SpeculationScope
    on: bool


class GetCapabilities(Struct, frozen=True, tag=True):
    call: int


class GetHealth(Struct, frozen=True, tag=True):
    call: int


class GetCosts(Struct, frozen=True, tag=True):
    call: int


class Commits(Struct, frozen=True, tag=True):
    """What one pass committed for this client's requests."""

    commits: tuple[Commit, ...]


class Refused(Struct, frozen=True, tag=True):
    """A request that will not run; ``overloaded`` says that it may be sent again."""

    request_id: str
    message: str
    param: str | None = None
    overloaded: bool = False


class Reply(Struct, frozen=True, tag=True):
    """Answer to a call; ``error`` is set instead where it failed."""

    call: int
    result: Capabilities | Health | CostTable | None = None
    error: str | None = None


ToEngine = Submit | Abort | LoadDrafter | Activate | SetSpeculation | GetCapabilities | GetHealth | GetCosts
FromEngine = Commits | Refused | Reply


def encode(message: ToEngine | FromEngine) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message's body; raises `asyncio.IncompleteReadError` at the end of the stream."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return await reader.readexactly(length)

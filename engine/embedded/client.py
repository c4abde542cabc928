"""The embedded engine as seen from another process: the `Engine` protocol over its Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from itertools import count
from pathlib import Path

import msgspec

from redraft.engine.embedded import wire
from redraft.engine.policy.cost import CostTable
from redraft.engine.protocol import EngineError, EngineOverloaded, EngineUnavailable, RequestRefused
from redraft.engine.types import (
    Capabilities,
    Commit,
    DrafterPointer,
    DrafterVersion,
    GenerationRequest,
    Health,
    SpeculationScope,
)

_LOST = "the engine went away; it restarts by itself, try again in a moment"


class EmbeddedEngine:
    """Connects on first use and again after the engine has restarted; requests in flight then fail by name."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._streams: dict[str, asyncio.Queue[Commit | EngineError]] = {}
        self._calls: dict[int, asyncio.Future[Capabilities | Health | CostTable | None]] = {}
        self._call_ids = count()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit]:
        stream: asyncio.Queue[Commit | EngineError] = asyncio.Queue()
        if request.request_id in self._streams:
            raise RequestRefused(f"request id {request.request_id} is already running")
        self._streams[request.request_id] = stream
        unfinished = request.n
        try:
            await self._send(wire.Submit(request))
            while unfinished:
                item = await stream.get()
                if isinstance(item, EngineError):
                    unfinished = 0
                    raise item
                unfinished = 0 if item.finish_reason == "abort" else unfinished - (item.finish_reason is not None)
                yield item
        finally:
            del self._streams[request.request_id]
            if unfinished:
                with contextlib.suppress(EngineUnavailable):
                    await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        await self._send(wire.Abort(request_id))

    async def load_drafter(self, version: DrafterVersion, path: Path) -> None:
        await self._call(lambda call: wire.LoadDrafter(call, version, str(path)))

    async def activate(self, pointer: DrafterPointer) -> None:
        await self._call(lambda call: wire.Activate(call, pointer))

    async def set_speculation(self, scope: SpeculationScope, on: bool) -> None:
        await self._call(lambda call: wire.SetSpeculation(call, scope, on))

    async def capabilities(self) -> Capabilities:
        result = await self._call(wire.GetCapabilities)
        assert isinstance(result, Capabilities)
        return result

    async def health(self) -> Health:
        try:
            result = await self._call(wire.GetHealth)
        except EngineUnavailable as error:
            return Health(ready=False, detail=str(error))
        assert isinstance(result, Health)
        return result

    async def costs(self) -> CostTable:
        result = await self._call(wire.GetCosts)
        assert isinstance(result, CostTable)
        return result

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    async def _call(self, message: Callable[[int], wire.ToEngine]) -> Capabilities | Health | CostTable | None:
        call = next(self._call_ids)
        future: asyncio.Future[Capabilities | Health | CostTable | None] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            await self._send(message(call))
            return await future
        finally:
            del self._calls[call]

    async def _send(self, message: wire.ToEngine) -> None:
        async with self._connecting:
            if self._writer is None:
                await self._connect()
            assert self._writer is not None
            self._writer.write(wire.encode(message))

    async def _connect(self) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError as error:
            raise EngineUnavailable("the engine is not running or still loading its model") from error
        self._reading = asyncio.create_task(self._read(reader, self._writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder(wire.FromEngine)
        try:
            while True:
                self._dispatch(decoder.decode(await wire.read_frame(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer = None
            writer.close()
            for stream in self._streams.values():
                stream.put_nowait(EngineUnavailable(_LOST))
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineUnavailable(_LOST))

    def _dispatch(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Commits(commits):
                for commit in commits:
                    if (stream := self._streams.get(commit.request_id)) is not None:
                        stream.put_nowait(commit)
            case wire.Refused(request_id, text, param, overloaded):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.put_nowait(EngineOverloaded(text) if overloaded else RequestRefused(text, param))
            case wire.Reply(call, result, error):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(RequestRefused(error))

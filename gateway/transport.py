"""Bodies in, bodies and event streams out, and what happens when a client hangs up in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from redraft.gateway.errors import ApiError, as_api_error

log = logging.getLogger(__name__)
T = TypeVar("T")


class ClientDisconnected(Exception):
    """Nobody is left to answer."""


class JSONResponse(Response):
    """A response encoded by msgspec; takes Structs as well as plain values."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """Read a request body of at most ``limit`` bytes; larger ones are refused as soon as that is known."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Compressed request bodies are not accepted; send the JSON as it is.")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the {limit} bytes allowed.", code="request_too_large")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; when the client hangs up first, cancel it, wait for its clean-up, raise ClientDisconnected."""
    task = asyncio.create_task(work)
    hangup = asyncio.create_task(_hangup(receive))
    try:
        await asyncio.wait((task, hangup), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return await task
    finally:
        task.cancel()
        hangup.cancel()
        await asyncio.gather(task, hangup, return_exceptions=True)


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator of JSON texts, which is closed as soon as the client hangs up.

    Headers wait for the first event, so that an error before it is an ordinary HTTP error; a later one, the server's
    own end included, is sent as an event. ``[DONE]`` follows only a stream that ended well. Works under any ASGI spec
    version: a hang-up is a ``http.disconnect`` message (2.3) or an OSError out of ``send`` (2.4).
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], request_id: str, headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def deliver(message: Message) -> None:
            try:
                await send(message)
            except (OSError, RuntimeError) as exc:  # uvloop: "the handler is closed"
                raise ClientDisconnected from exc

        await until_disconnect(receive, self._stream(deliver))

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_event(first))
            try:
                async for event in events:
                    await send(_event(event))
                last = b"[DONE]"
            except ClientDisconnected:
                raise
            except (Exception, asyncio.CancelledError) as exc:
                error = as_api_error(exc, self._request_id)
                if error.status == 500:
                    log.exception("request %s failed while streaming", self._request_id)
                last = msgspec.json.encode(error.body)
        await send(_event(last))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: bytes) -> Message:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}

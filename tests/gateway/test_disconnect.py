"""A client that hangs up frees what it held in the engine, whenever it does so and whatever server runs the app."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any

import pytest

from redraft.engine.chat.encoding import ChatEncoder
from redraft.gateway.app import create_app
from redraft.gateway.config import GatewayConfig

pytestmark = pytest.mark.unit

BEFORE, AFTER = "before the first token", "after the first token"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": ["Hi", "you", "there"]},
}
every_route = pytest.mark.parametrize("route", BODIES)


def script(engine: Any, when: str, hang: object) -> Any:
    return lambda request: [hang] if when == BEFORE else [engine.commit(engine.ids("Hello")), hang]


def connect(gateway: Any, route: str, **fields: Any) -> socket.socket:
    body = json.dumps(BODIES[route] | fields).encode()
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def wait_until_idle(gateway: Any) -> None:
    for _ in range(200):
        if gateway.metric("redraft_requests_in_flight") == 0:
            return
        time.sleep(0.01)
    raise AssertionError("a request is still in flight")


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@every_route
def test_a_hang_up_aborts_in_the_engine_within_a_second(
    gateway: Any, hang: object, route: str, stream: bool, when: str, reset: bool
) -> None:
    """Every prompt of a request, on every route that answers (BerriAI/litellm 30244, 31499, 36123)."""
    gateway.engine.script = script(gateway.engine, when, hang)
    client = connect(gateway, route, stream=stream)
    assert gateway.engine.hanging.wait(10)
    if stream and when == AFTER:
        assert b"Hello" in client.recv(65536)
    assert gateway.metric("redraft_requests_in_flight") == 1
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert gateway.engine.closed.wait(1)
    wait_until_idle(gateway)
    assert gateway.engine.running == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_hang_up_behind_a_pipelined_request_is_noticed(gateway: Any, hang: object, stream: bool) -> None:
    gateway.engine.script = script(gateway.engine, AFTER, hang)
    client = connect(gateway, "/v1/chat/completions", stream=stream)
    assert gateway.engine.hanging.wait(10)
    second = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000
    client.sendall(second * 4)
    client.close()
    assert gateway.engine.closed.wait(1)
    wait_until_idle(gateway)


def test_a_pipelined_request_is_dropped_and_the_first_is_answered_whole(gateway: Any) -> None:
    gateway.engine.script = lambda request: gateway.engine.answer("Hello")
    body = json.dumps(BODIES["/v1/chat/completions"]).encode()
    one = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(one + one)
        received = b""
        while data := client.recv(65536):
            received += data
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"Hello" in received
    assert b"connection: close" in received.lower()


def test_a_client_that_stops_reading_and_then_hangs_up_frees_its_slot(gateway: Any) -> None:
    engine = gateway.engine
    text = engine.ids("x" * 1000)
    engine.script = lambda request: (engine.commit(text) for _ in range(1_000_000))
    client = connect(gateway, "/v1/chat/completions", stream=True)
    client.recv(1024)
    client.close()
    assert engine.closed.wait(1)
    wait_until_idle(gateway)


class Connection:
    """One ASGI connection, driven by hand as a server of the given spec version would."""

    def __init__(self, spec_version: str, body: bytes, route: str = "/v1/chat/completions") -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": route,
            "raw_path": route.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.messages = [{"type": "http.request", "body": body, "more_body": False}]
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.tells = True
        self.got_body = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop()
        await self.gone.wait()
        if not self.tells:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self.gone.is_set() and self.scope["asgi"]["spec_version"] == "2.4":
            raise OSError("connection lost")
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@every_route
def test_a_disconnect_message_ends_the_request(
    chat: ChatEncoder, scripted: Any, hang: object, route: str, stream: bool, when: str, spec_version: str
) -> None:
    async def main() -> None:
        scripted.script = script(scripted, when, hang)
        app = create_app(GatewayConfig(), scripted, chat)
        connection = Connection(spec_version, json.dumps(BODIES[route] | {"stream": stream}).encode(), route)
        call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(scripted.hanging.wait, 10)
            connection.gone.set()
            await call
        assert scripted.closed.is_set()
        assert scripted.running == 0
        assert bool(connection.sent) == (stream and when == AFTER)

    asyncio.run(main())


def test_a_failing_send_alone_ends_a_stream(chat: ChatEncoder, scripted: Any) -> None:
    async def main() -> None:
        wrote = asyncio.Event()

        def endless(request: Any) -> Any:
            while True:
                yield scripted.commit(scripted.ids("Hello"))
                yield wrote

        scripted.script = endless
        app = create_app(GatewayConfig(), scripted, chat)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        connection = Connection("2.4", json.dumps(body).encode())
        connection.tells = False
        call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
        async with asyncio.timeout(10):
            await connection.got_body.wait()
            connection.gone.set()
            wrote.set()
            await call
        assert scripted.closed.is_set()

    asyncio.run(main())


def test_a_client_that_leaves_while_sending_its_body_is_forgotten(gateway: Any) -> None:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    client.close()
    wait_until_idle(gateway)
    assert gateway.engine.requests == []
    assert gateway.post().status_code == 200

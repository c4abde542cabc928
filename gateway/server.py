"""Serving an app on an address, with a clear message when the address cannot be had."""

from __future__ import annotations

import contextlib
import errno
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

GRACEFUL_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection (httpx: 5 seconds), so that none meets one the server just closed."""


class AddressUnavailable(Exception):
    """The address cannot be listened on; the message says why and what to do."""


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 without pipelining: what comes behind a request that is being answered is dropped, unread.

    uvicorn would queue it and stop reading, and then not notice when the client hangs up. The connection closes after
    the answer, which tells a client that did pipeline to send the rest again.
    """

    _dropping = False

    def data_received(self, data: bytes) -> None:
        if not self._dropping:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        if self._dropping:
            return
        answering = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self._dropping = True
            self.pipeline.clear()
            self.cycle = answering
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if not self._dropping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._dropping:
            super().on_message_complete()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port``; port 0 takes a free one, which ``getsockname`` then tells."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as exc:
        raise AddressUnavailable(f"gateway.host {host!r} is not an address of this machine: {exc}.") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise AddressUnavailable(_bind_message(host, port, exc)) from exc
    return sock


def _bind_message(host: str, port: int, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is already in use. Stop what listens there, or set gateway.port to another one."
    if exc.errno == errno.EACCES:
        return f"Port {port} on {host} needs privileges. Set gateway.port to one above 1023."
    return f"Cannot listen on {host}:{port}: {exc.strerror}. Set gateway.host to an address of this machine."


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server with this gateway's settings; ``should_exit = True`` stops it gracefully."""
    config = uvicorn.Config(
        app,
        loop="auto",
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
    )
    return uvicorn.Server(config)


def serve(app: ASGIApp, sock: socket.socket) -> None:
    """Serve ``app`` on a bound socket until SIGTERM or SIGINT; running answers get ``GRACEFUL_SECONDS`` to end."""
    with sock, contextlib.suppress(KeyboardInterrupt):
        make_server(app).run(sockets=[sock])

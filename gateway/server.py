"""Serving an app on an address, with a clear message when the address cannot be had."""

from __future__ import annotations

import contextlib
import errno
import socket

import uvicorn
from starlette.types import ASGIApp

GRACEFUL_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection (httpx: 5 seconds), so that none meets one the server just closed."""


class AddressUnavailable(Exception):
    """The address cannot be listened on; the message says why and what to do."""


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
        http="httptools",
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

"""What every request passes through: its id, its place in the metrics, and the last word on its errors."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from contextlib import nullcontext

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redraft.feedback.metrics import ServingMetrics
from redraft.gateway.errors import as_api_error
from redraft.gateway.transport import ClientDisconnected, JSONResponse

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_CLOSED = 499


class RequestMiddleware:
    """Names, counts and, when it fails, answers each HTTP request.

    The client's ``x-request-id`` is kept if it is at most 128 of ``A-Za-z0-9._:-``, else replaced; it is in
    ``request.state.request_id`` and in the response. A client that hung up counts under status 499.
    """

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            with self._metrics.in_flight.track_inprogress() if scope["path"].startswith("/v1/") else nullcontext():
                await self._app(scope, receive, send_named)
        except ClientDisconnected:
            status = CLIENT_CLOSED
        except (Exception, asyncio.CancelledError) as exc:
            error = as_api_error(exc, request_id)
            if error.status == 500:
                log.exception("request %s failed", request_id)
            if not status:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send_named)
            elif isinstance(exc, Exception):
                raise
        finally:
            self._metrics.count_request(getattr(scope.get("route"), "path", "unmatched"), status)

"""The gateway as an ASGI app: which path leads where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.protocol import Engine
from redraft.gateway.config import GatewayConfig
from redraft.gateway.errors import ApiError
from redraft.gateway.middleware import RequestMiddleware
from redraft.gateway.service import Gateway
from redraft.gateway.transport import JSONResponse


def create_app(config: GatewayConfig, engine: Engine, chat: ChatEncoder) -> FastAPI:
    """The gateway in front of ``engine``, which it closes at shutdown; ``chat`` belongs to the served checkpoint."""
    gateway = Gateway(config, engine, chat)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(RequestMiddleware, metrics=gateway.metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_api_route("/v1/chat/completions", gateway.chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", gateway.model, methods=["GET"])
    app.add_api_route("/health", gateway.health, methods=["GET"])
    app.add_api_route("/ready", gateway.ready, methods=["GET"])
    app.add_api_route("/metrics", gateway.scrape, methods=["GET"])
    return app


async def _http_error(request: Request, exc: Exception) -> Response:
    """The framework's own refusals: no such path, or not with this method."""
    assert isinstance(exc, HTTPException)
    message = f"{exc.detail}: {request.method} {request.scope['path'][:256]}."
    error = ApiError(exc.status_code, message, headers=dict(exc.headers or {}))
    return JSONResponse(error.body, error.status, error.headers)

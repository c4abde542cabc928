"""The gateway as an ASGI app: which path leads where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.protocol import Engine
from redraft.feedback.recorder import Recorder
from redraft.gateway.chat_request import CHAT_BODY
from redraft.gateway.chat_response import ChatCompletion, ChatCompletionChunk
from redraft.gateway.config import GatewayConfig
from redraft.gateway.errors import ApiError
from redraft.gateway.middleware import RequestMiddleware
from redraft.gateway.openapi import Operation, document
from redraft.gateway.response import Model, ModelList, Status
from redraft.gateway.service import Gateway
from redraft.gateway.text_request import TEXT_BODY
from redraft.gateway.text_response import TextCompletion
from redraft.gateway.tokenization import DETOKENIZE_BODY, TOKENIZE_BODY, Text, Tokens
from redraft.gateway.transport import JSONResponse


def create_app(config: GatewayConfig, engine: Engine, chat: ChatEncoder, recorder: Recorder | None = None) -> FastAPI:
    """The gateway in front of ``engine``; ``chat`` belongs to the served checkpoint, ``recorder`` takes the answers.

    Engine and recorder are closed at shutdown.
    """
    gateway = Gateway(config, engine, chat, recorder)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        try:
            await engine.close()
        finally:
            if recorder is not None:
                await asyncio.to_thread(recorder.close)

    app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(RequestMiddleware, metrics=gateway.metrics)
    app.add_exception_handler(HTTPException, _http_error)
    operations = (
        Operation(
            "POST", "/v1/chat/completions", gateway.chat_completions, ChatCompletion, CHAT_BODY, ChatCompletionChunk
        ),
        Operation("POST", "/v1/completions", gateway.text_completions, TextCompletion, TEXT_BODY, TextCompletion),
        Operation("POST", "/v1/tokenize", gateway.tokenize, Tokens, TOKENIZE_BODY),
        Operation("POST", "/v1/detokenize", gateway.detokenize, Text, DETOKENIZE_BODY),
        Operation("GET", "/v1/models", gateway.models, ModelList),
        Operation("GET", "/v1/models/{model:path}", gateway.model, Model),
        Operation("GET", "/health", gateway.health, Status),
        Operation("GET", "/ready", gateway.ready, Status),
        Operation("GET", "/metrics", gateway.scrape, None),
    )
    for operation in operations:
        app.add_api_route(operation.path, operation.handler, methods=[operation.method])
    described = JSONResponse(document(operations))
    app.add_route("/openapi.json", lambda request: described, methods=["GET"])
    return app


async def _http_error(request: Request, exc: Exception) -> Response:
    """The framework's own refusals: no such path, or not with this method."""
    assert isinstance(exc, HTTPException)
    message = f"{exc.detail}: {request.method} {request.scope['path'][:256]}."
    error = ApiError(exc.status_code, message, headers=dict(exc.headers or {}))
    return JSONResponse(error.body, error.status, error.headers)

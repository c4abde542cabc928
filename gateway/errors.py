"""Every error a client can see, in OpenAI's shape."""

from __future__ import annotations

import asyncio

import msgspec

from redraft.engine.protocol import EngineOverloaded, EngineUnavailable, RequestRefused

RETRY_AFTER_SECONDS = 1


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """What a client reads: ``{"error": {"message", "type", "param", "code"}}``."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends in an HTTP error; the message tells the client what is wrong and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))


class InvalidRequest(ApiError):
    """A 400: ``param`` names the field to blame, as ``messages[2].content``."""

    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(400, message, param=param, code=code)


def as_api_error(exc: BaseException, request_id: str) -> ApiError:
    """The error a client is shown for ``exc``; of the unexpected it learns the request id only.

    A request is cancelled when the server stops and it did not end in time.
    """
    match exc:
        case ApiError():
            return exc
        case RequestRefused():
            return InvalidRequest(str(exc), exc.param)
        case EngineOverloaded():
            return ApiError(429, str(exc), kind="rate_limit_error", code="engine_overloaded", headers=_retry_after())
        case EngineUnavailable():
            return ApiError(503, str(exc), kind="server_error", code="engine_unavailable", headers=_retry_after())
        case asyncio.CancelledError():
            message = "The server is shutting down; send the request again."
            return ApiError(503, message, kind="server_error", code="shutting_down", headers=_retry_after())
        case _:
            message = f"The server failed on this request; its log has the details under request id {request_id}."
            return ApiError(500, message, kind="server_error", code="internal_error")


def _retry_after() -> dict[str, str]:
    return {"retry-after": str(RETRY_AFTER_SECONDS)}

"""Who is asking: the one place where a request's tenant is decided."""

from __future__ import annotations

from starlette.datastructures import Headers

from redraft.engine.types import Principal


def resolve_principal(headers: Headers) -> Principal:
    """The tenant a request belongs to; there is one as yet, whatever key the client sends."""
    return Principal("default")

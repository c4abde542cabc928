"""The tokens behind the events: one answered turn each, kept by content, apart by tenant, forgotten when asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol

import msgspec
from msgspec import Struct

from redraft.engine.types import SamplingParams


class TurnContext(Struct, frozen=True, kw_only=True):
    """One turn of a session: ``token_ids`` are the prompt, ``prompt_tokens`` long, and the answer behind it."""

    tenant: str
    session: str
    time: float
    target: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams


def session_key(tenant: str, session: str) -> str:
    """16 hex digits with which the ids of a session's contexts begin."""
    return hashlib.blake2b(f"{tenant}\0{session}".encode(), digest_size=8).hexdigest()


def context_id(context: TurnContext) -> str:
    """40 hex digits that equal turns share: 16 of tenant and session, 24 of everything in it."""
    content = hashlib.blake2b(msgspec.msgpack.encode(context), digest_size=12).hexdigest()
    return session_key(context.tenant, context.session) + content


class ContextStore(Protocol):
    """Append-only; the truth from which features are made again."""

    def put(self, context: TurnContext) -> str:
        """Keep a turn and return its ``context_id``; raises OSError where it cannot."""
        ...

    def get(self, tenant: str, context_id: str) -> TurnContext | None:
        """None if it was never kept, has expired, was erased, or is another tenant's."""
        ...

    def ids(self, tenant: str) -> Iterator[str]: ...

    def erase(self, tenant: str, session: str | None = None) -> int:
        """Forget a tenant's turns, or one session's; returns how many."""
        ...

    def expire(self, before: float) -> int:
        """Forget turns older than a time; returns how many."""
        ...

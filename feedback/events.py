"""What serving tells the loop, schema 1: how each answer's drafts fared, and the spans of it worth learning from.

Events carry references and counts, never tensors or text; the tokens around a span are in the `ContextStore`. An
event's id follows from what it is about, so that one delivered twice is known as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from redraft.engine.types import DrafterVersion, FinishReason, SamplingParams, Stratum

SCHEMA = 1

Reason = Literal["rejected", "entropy", "draft_prob", "tool_call", "baseline"]
"""Why a span was kept; ``baseline`` spans are whole answers of uniformly sampled sessions, which give no others."""


class Origin(Struct, frozen=True, kw_only=True):
    """Whose answer it was, and what made it; ``session`` is a hash.

    ``target``, ``tokenizer`` and ``template`` are the hashes of what served.
    """

    tenant: str
    agent_type: str
    session: str
    request_id: str
    choice: int
    target: str
    tokenizer: str
    template: str


class SpanEvent(Struct, frozen=True, kw_only=True, tag="span"):
    """Verify steps of one drafter in a row worth learning from: positions [start, end) of the context's tokens.

    ``start`` is the first position that a verify step tried to fill. ``drafted``, ``draft_prob``, ``block_length`` and
    ``accepted`` have an entry a verify step, ``target_tokens`` and ``entropies`` (nats, or None where they were not
    measured) one a committed token. ``censored`` says that in some step acceptance ended with the verified block or
    the answer, not with a rejection, while drafted tokens were left. ``probability`` is that with which a span of this
    kind is kept. ``context`` may be missing from the store: expired, erased or lost.
    """

    id: str
    schema: int = SCHEMA
    time: float
    origin: Origin
    drafter: DrafterVersion | None
    sampling: SamplingParams
    constrained: bool
    start: int
    end: int
    block_length: tuple[int, ...]
    rows_verified: int
    accepted: tuple[int, ...]
    drafted: tuple[tuple[int, ...], ...]
    target_tokens: tuple[int, ...]
    draft_prob: tuple[tuple[float, ...], ...] | None
    entropies: tuple[float, ...] | None
    censored: bool
    reason: Reason
    probability: float
    context: str


class StepCounts(Struct, frozen=True, kw_only=True):
    """Sums over an answer's verify steps of one drafter in one context bucket.

    ``committed`` and ``verify_steps`` are over all of them; ``reached`` and ``accepted``, by position from 1, over the
    exploration steps alone: those in which every drafted token before the position was accepted and it was compared
    with the target's, and those in which it was accepted too. They are as long as the longest block explored.
    """

    drafter: DrafterVersion
    stratum: Stratum
    committed: int
    verify_steps: int
    explored_steps: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]


class TurnEvent(Struct, frozen=True, kw_only=True, tag="turn"):
    """One answer as it ended: what drift is judged by.

    ``finish_reason`` is ``abort`` where the client left or the engine gave up: its counts are of what was committed
    until then, and it has no spans. ``baseline`` marks a session of the uniform sample, drawn with ``probability``.
    ``context`` is None where nothing of the turn was worth keeping or a quota did not allow it, and may be missing
    from the store. Steps without a drafter are in no ``counts``.
    """

    id: str
    schema: int = SCHEMA
    time: float
    origin: Origin
    sampling: SamplingParams
    constrained: bool
    prompt_tokens: int
    completion_tokens: int
    looping: bool
    baseline: bool
    probability: float
    counts: tuple[StepCounts, ...]
    context: str | None
    finish_reason: FinishReason = "stop"


Event = SpanEvent | TurnEvent

Cursor = str
"""A place between two events of a source: opaque, a later one compares greater; ``START`` is before all."""

START: Cursor = ""


class SpanSink(Protocol):
    """Where events go."""

    def append(self, events: Sequence[Event]) -> None:
        """Keep all of them, in order; raises OSError where it cannot."""
        ...

    def maintain(self, now: float) -> None:
        """Whatever retention asks for at a time, in seconds since the epoch."""
        ...

    def close(self) -> None: ...


class SpanSource(Protocol):
    """Where events come from, in the order they went in; any number of readers, none disturbs another."""

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Event], Cursor]:
        """At most ``limit`` events behind ``cursor``, and the cursor behind them; none where there are no more yet.

        What a later schema added is passed over: unknown fields, and events of unknown kinds.
        """
        ...


def event_id(request_id: str, choice: int, position: int, kind: str) -> str:
    """32 hex digits that the same answer, place and kind of event always have.

    >>> event_id("a", 0, 7, "turn") == event_id("a", 0, 7, "turn") != event_id("a", 0, 7, "rejected")
    True
    """
    return hashlib.blake2b(f"{request_id}\0{choice}\0{position}\0{kind}".encode(), digest_size=16).hexdigest()


def session_hash(tenant: str, session_id: str) -> str:
    """A session's name in events: the client's own does not leave the gateway."""
    return hashlib.blake2b(f"{tenant}\0{session_id}".encode(), digest_size=16).hexdigest()

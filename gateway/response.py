"""What answers of every protocol have in common; field order and nulls as OpenAI's own servers send them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AcceptLengthOut(Struct, frozen=True):
    """Accept length as numerator and denominator."""

    committed_tokens: int
    verify_steps: int


class DrafterOut(Struct, frozen=True):
    kind: str
    version: str


class Statistics(Struct, frozen=True):
    """What speculation did for one request; present when ``redraft.return_statistics`` asked for it."""

    session_id: str
    seed: int | None
    accept_length: AcceptLengthOut
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    cached_tokens: int
    drafters: list[DrafterOut]


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "redraft"


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Status(Struct, frozen=True, omit_defaults=True):
    """``detail`` says in words what the engine does otherwise than it should, though requests are answered."""

    status: str
    detail: str = ""

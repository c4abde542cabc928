"""OpenAI's chat completion answers, whole and in chunks; field order and nulls as its own servers send them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionOut(Struct, frozen=True):
    name: str
    arguments: str


class ToolCallOut(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionOut


class MessageOut(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChoiceOut(Struct, frozen=True, kw_only=True):
    index: int
    message: MessageOut
    logprobs: None = None
    finish_reason: FinishReason | None


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


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChoiceOut]
    usage: Usage
    redraft: Statistics | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDeltaOut(Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDeltaOut] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """``usage`` is null in every chunk but the last when the client asked for usage, and absent when it did not."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    redraft: Statistics | UnsetType = UNSET


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "redraft"


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]

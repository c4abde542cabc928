"""OpenAI's chat completion answers, whole and in chunks; field order and nulls as its own servers send them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from redraft.gateway.response import FinishReason, Statistics, Usage


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


class AlternativeOut(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobOut(Struct, frozen=True):
    """A token of the answer's text; ``bytes`` is null for a control token, which has no text."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[AlternativeOut]


class LogprobsOut(Struct, frozen=True):
    content: list[TokenLogprobOut]
    refusal: None = None


class ChoiceOut(Struct, frozen=True, kw_only=True):
    index: int
    message: MessageOut
    logprobs: LogprobsOut | None = None
    finish_reason: FinishReason | None


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


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDeltaOut] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: LogprobsOut | None = None
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

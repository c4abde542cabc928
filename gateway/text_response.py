"""OpenAI's text completion answers, whole and in chunks, which have the same shape."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from redraft.gateway.response import FinishReason, Statistics, Usage


class TextLogprobsOut(Struct, frozen=True):
    """Beside each token: its log-probability, those of the most likely tokens and itself, and where its text begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: TextLogprobsOut | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(Struct, frozen=True, kw_only=True):
    """In a stream, ``usage`` is null in every chunk but the last when asked for, and absent when not."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    redraft: Statistics | UnsetType = UNSET

"""Responses: what the target answered to a prompt."""

from __future__ import annotations

from msgspec import Struct

from redraft.engine.types import FinishReason, SamplingParams


class Response(Struct, frozen=True):
    """One answer to the prompt with the id ``prompt``; ``token_ids`` end with the end token where one was made."""

    prompt: str
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    looping: bool

    @property
    def key(self) -> tuple[str, SamplingParams]:
        """What was asked; no two responses have the same."""
        return self.prompt, self.sampling

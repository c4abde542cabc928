"""A completion on its way out, in whatever protocol: what surrounds its choices, and how a stream of them ends."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from redraft.engine.types import Capabilities
from redraft.gateway.completion import Completion, Step
from redraft.gateway.prompt import Prepared
from redraft.gateway.response import AcceptLengthOut, DrafterOut, PromptDetails, Statistics, Usage

_ENCODER = msgspec.json.Encoder()


class Answer(ABC):
    """Writes one completion out; call ``completed`` or iterate ``chunks``, once."""

    id_prefix: ClassVar[str]

    def __init__(self, id_: str, completion: Completion, prepared: Prepared, capabilities: Capabilities) -> None:
        self._completion = completion
        self._prepared = prepared
        self._envelope: dict[str, Any] = {
            "id": id_,
            "created": int(time.time()),
            "model": capabilities.model_name,
            "system_fingerprint": f"fp_{capabilities.target.rpartition(':')[2][:12]}",
        }

    async def completed(self) -> Struct:
        await self._completion.run()
        return self._whole(usage=self._usage(), redraft=self._statistics())

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The JSON of each chunk; statistics come in the last one."""
        include_usage = self._prepared.generation.include_usage
        unfinished = len(self._completion.choices)
        usage = None if include_usage else UNSET
        async with aclosing(self._completion.steps()) as steps:
            async for step in steps:
                unfinished -= step.finish_reason is not None
                choices = self._choices(step)
                for number, choice in enumerate(choices, 1):
                    is_last = not unfinished and not include_usage and number == len(choices)
                    statistics = self._statistics() if is_last else UNSET
                    yield _ENCODER.encode(self._chunk([choice], usage=usage, redraft=statistics))
        if include_usage:
            yield _ENCODER.encode(self._chunk([], usage=self._usage(), redraft=self._statistics()))

    @abstractmethod
    def _whole(self, *, usage: Usage, redraft: Statistics | UnsetType) -> Struct:
        """The finished completion."""

    @abstractmethod
    def _choices(self, step: Step) -> list[Any]:
        """What a step adds to the stream, one chunk each."""

    @abstractmethod
    def _chunk(self, choices: list[Any], *, usage: Usage | UnsetType | None, redraft: Statistics | UnsetType) -> Struct:
        """A chunk with these choices."""

    def _usage(self) -> Usage:
        prompt, completion = self._completion.prompt_tokens, self._completion.completion_tokens
        return Usage(prompt, completion, prompt + completion, PromptDetails(self._completion.cached_tokens))

    def _statistics(self) -> Statistics | UnsetType:
        if not self._prepared.generation.return_statistics:
            return UNSET
        completion, tally = self._completion, self._completion.tally
        return Statistics(
            session_id=completion.session_id,
            seed=completion.seed,
            accept_length=AcceptLengthOut(tally.accept_length.committed, tally.accept_length.verify_steps),
            drafted_tokens=tally.drafted,
            verified_tokens=tally.verified,
            accepted_tokens=tally.accepted,
            cached_tokens=completion.cached_tokens,
            drafters=[DrafterOut(drafter.kind, drafter.id) for drafter in tally.drafters],
        )

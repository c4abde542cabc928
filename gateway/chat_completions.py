"""A completion as OpenAI's chat completion object, or as its stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from redraft.engine.chat.messages import Message
from redraft.engine.chat.tool_calls import ContentDelta
from redraft.engine.types import Capabilities
from redraft.gateway.chat_request import ChatRequest
from redraft.gateway.chat_response import (
    AcceptLengthOut,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceOut,
    ChunkChoice,
    Delta,
    DrafterOut,
    FunctionDelta,
    FunctionOut,
    MessageOut,
    PromptDetails,
    Statistics,
    ToolCallDeltaOut,
    ToolCallOut,
    Usage,
)
from redraft.gateway.completion import AnswerDelta, Completion

_ENCODER = msgspec.json.Encoder()


class ChatAnswer:
    """Writes one completion out; call ``completed`` or iterate ``chunks``, once."""

    def __init__(self, completion: Completion, request: ChatRequest, capabilities: Capabilities) -> None:
        self._completion = completion
        self._include_usage = request.include_usage
        self._return_statistics = request.return_statistics
        self._envelope: dict[str, Any] = {
            "id": completion.request.request_id,
            "created": int(time.time()),
            "model": capabilities.model_name,
            "system_fingerprint": f"fp_{capabilities.target.rpartition(':')[2][:12]}",
        }

    async def completed(self) -> ChatCompletion:
        await self._completion.run()
        choices = [
            ChoiceOut(index=index, message=_message(choice.message()), finish_reason=choice.finish_reason)
            for index, choice in enumerate(self._completion.choices)
        ]
        return ChatCompletion(**self._envelope, choices=choices, usage=self._usage(), redraft=self._statistics())

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The JSON of each chunk; statistics come in the last one.

        A choice's role comes with its first delta. Choices open in the order of their indices, for the openai client
        cannot take one before those below it.
        """
        opened = 0
        unfinished = len(self._completion.choices)
        async with aclosing(self._completion.steps()) as steps:
            async for step in steps:
                deltas = [_delta(piece) for piece in step.deltas]
                if step.finish_reason is not None:
                    deltas.append(Delta(content="") if self._completion.choices[step.choice].is_empty else Delta())
                if not deltas:
                    continue
                for choice in range(opened, step.choice):
                    yield self._chunk([ChunkChoice(index=choice, delta=Delta(role="assistant", content=None))])
                if step.choice >= opened:
                    opened = step.choice + 1
                    deltas[0].role = "assistant"
                    deltas[0].content = None if deltas[0].content is UNSET else deltas[0].content
                for delta in deltas[:-1]:
                    yield self._chunk([ChunkChoice(index=step.choice, delta=delta)])
                unfinished -= step.finish_reason is not None
                last = ChunkChoice(index=step.choice, delta=deltas[-1], finish_reason=step.finish_reason)
                yield self._chunk([last], last=not unfinished and not self._include_usage)
        if self._include_usage:
            yield self._chunk([], usage=self._usage(), last=True)

    def _chunk(self, choices: list[ChunkChoice], *, usage: Usage | None = None, last: bool = False) -> bytes:
        chunk = ChatCompletionChunk(
            **self._envelope,
            choices=choices,
            usage=usage if self._include_usage else UNSET,
            redraft=self._statistics() if last else UNSET,
        )
        return _ENCODER.encode(chunk)

    def _usage(self) -> Usage:
        prompt, completion = len(self._completion.request.prompt_ids), self._completion.completion_tokens
        return Usage(prompt, completion, prompt + completion, PromptDetails(self._completion.cached_tokens))

    def _statistics(self) -> Statistics | msgspec.UnsetType:
        if not self._return_statistics:
            return UNSET
        completion, tally = self._completion, self._completion.tally
        return Statistics(
            session_id=completion.request.session_id,
            seed=completion.seed,
            accept_length=AcceptLengthOut(tally.accept_length.committed, tally.accept_length.verify_steps),
            drafted_tokens=tally.drafted,
            verified_tokens=tally.verified,
            accepted_tokens=tally.accepted,
            cached_tokens=completion.cached_tokens,
            drafters=[DrafterOut(drafter.kind, drafter.id) for drafter in tally.drafters],
        )


def _message(message: Message) -> MessageOut:
    calls = [ToolCallOut(id=call.id, function=FunctionOut(call.name, call.arguments)) for call in message.tool_calls]
    return MessageOut(content=message.content, tool_calls=calls or UNSET)


def _delta(piece: AnswerDelta) -> Delta:
    if isinstance(piece, ContentDelta):
        return Delta(content=piece.text)
    call = ToolCallDeltaOut(
        index=piece.index,
        id=UNSET if piece.id is None else piece.id,
        type=UNSET if piece.id is None else "function",
        function=FunctionDelta(piece.name, piece.arguments),
    )
    return Delta(tool_calls=[call])

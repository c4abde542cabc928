"""A completion as OpenAI's chat completion object, or as its stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from redraft.engine.chat.messages import Message
from redraft.engine.chat.tool_calls import ContentDelta
from redraft.engine.types import Capabilities
from redraft.gateway.answer import Answer
from redraft.gateway.chat_response import (
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceOut,
    ChunkChoice,
    Delta,
    FunctionDelta,
    FunctionOut,
    LogprobsOut,
    MessageOut,
    ToolCallDeltaOut,
    ToolCallOut,
)
from redraft.gateway.completion import AnswerDelta, Completion, ScoredToken, Step
from redraft.gateway.logprobs import chat_logprobs
from redraft.gateway.prompt import Prepared
from redraft.gateway.response import Statistics, Usage


class ChatAnswer(Answer):
    """In a stream, a choice opens with a chunk of its own that tells its role.

    Choices open in the order of their indices, for the openai client cannot take one before those below it; and it
    counts log-probabilities in an opening chunk twice.
    """

    id_prefix = "chatcmpl"

    def __init__(self, id_: str, completion: Completion, prepared: Prepared, capabilities: Capabilities) -> None:
        super().__init__(id_, completion, prepared, capabilities)
        self._opened = 0

    def _whole(self, *, usage: Usage, redraft: Statistics | UnsetType) -> ChatCompletion:
        choices = [
            ChoiceOut(
                index=index,
                message=_message(choice.message()),
                logprobs=self._logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(self._completion.choices)
        ]
        return ChatCompletion(**self._envelope, choices=choices, usage=usage, redraft=redraft)

    def _choices(self, step: Step) -> list[ChunkChoice]:
        deltas = [_delta(piece) for piece in step.deltas]
        if step.finish_reason is not None:
            deltas.append(Delta(content="") if self._completion.choices[step.choice].is_empty else Delta())
        elif step.logprobs and not deltas:
            deltas.append(Delta())
        if not deltas:
            return []
        opening = range(self._opened, step.choice + 1)
        self._opened = max(self._opened, step.choice + 1)
        choices = [ChunkChoice(index=index, delta=Delta(role="assistant", content=None)) for index in opening]
        last = len(deltas) - 1
        choices += [
            ChunkChoice(
                index=step.choice,
                delta=delta,
                logprobs=self._logprobs(step.logprobs) if i == 0 and step.logprobs else None,
                finish_reason=step.finish_reason if i == last else None,
            )
            for i, delta in enumerate(deltas)
        ]
        return choices

    def _chunk(
        self, choices: list[ChunkChoice], *, usage: Usage | UnsetType | None, redraft: Statistics | UnsetType
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._envelope, choices=choices, usage=usage, redraft=redraft)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> LogprobsOut | None:
        if self._prepared.generation.logprobs is None:
            return None
        return chat_logprobs(self._completion.tokenizer, scored)


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

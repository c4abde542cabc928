"""OpenAI's chat completion request: its JSON, checked, becomes the one internal request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from redraft.engine.chat.messages import Message, Tool
from redraft.engine.types import Capabilities
from redraft.gateway.answer_format import Grammar, ResponseFormat, ToolChoice, answer_grammar
from redraft.gateway.conversation import ChatMessage, ToolDefinition, messages_of, tools_of
from redraft.gateway.decoding import BodyDecoder
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.generation import Generation, GenerationFields, TokenCount, generation
from redraft.gateway.parameters import CHAT_PARAMETERS


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """The body of a chat completion request."""

    messages: list[ChatMessage]
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(Struct, frozen=True, kw_only=True):
    """A conversation, the tools the model may call in it, and how to go on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    grammar: Grammar | None
    generation: Generation


CHAT_BODY = BodyDecoder(ChatCompletionRequest, CHAT_PARAMETERS)


def parse_chat_request(body: bytes, capabilities: Capabilities) -> ChatRequest:
    """Check everything that can be known without the prompt's tokens and without compiling a grammar.

    Raises ApiError; pure and safe off the event loop. Nothing a client sent is dropped: a field is used, inert by the
    table in ``parameters``, or refused by name.
    """
    wire = CHAT_BODY.decode(body, capabilities)
    tools = tools_of(wire.tools or ())
    choice = wire.tool_choice or "auto"
    return ChatRequest(
        messages=messages_of(wire.messages),
        tools=() if choice == "none" else tools,
        grammar=answer_grammar(wire.response_format, tools, choice, parallel=wire.parallel_tool_calls is not False),
        generation=generation(wire, capabilities, max_tokens=_max_tokens(wire), logprobs=_logprobs(wire)),
    )


def _max_tokens(wire: ChatCompletionRequest) -> int | None:
    if wire.max_tokens and wire.max_completion_tokens and wire.max_tokens != wire.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them.", "max_tokens")
    return wire.max_completion_tokens or wire.max_tokens


def _logprobs(wire: ChatCompletionRequest) -> int | None:
    if wire.top_logprobs and not wire.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
    return wire.top_logprobs or 0 if wire.logprobs else None

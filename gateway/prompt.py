"""From a request's body to what the engine is given; pure, so that large ones can be prepared off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.renderer import RenderError
from redraft.engine.types import Capabilities, StopConditions
from redraft.gateway.chat_request import ChatRequest, parse_chat_request
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.sessions import Link, beyond_first_user, message_chain


class Prompt(Struct, frozen=True):
    """A checked request, its prompt, and where its messages stand in a session.

    ``links`` are the message chain beyond the first user message, ``end`` its last link.
    """

    request: ChatRequest
    token_ids: tuple[int, ...]
    stopping: StopConditions
    links: Sequence[Link]
    end: Link


def prepare(body: bytes, chat: ChatEncoder, capabilities: Capabilities, default_max_tokens: int | None) -> Prompt:
    """Parse, render, tokenize and check the length; raises ApiError."""
    request = parse_chat_request(body, capabilities)
    try:
        token_ids = chat.encode_chat(request.messages, request.tools)
    except RenderError as exc:
        raise InvalidRequest(str(exc), "messages") from exc
    except RecursionError as exc:
        raise InvalidRequest("A tool's parameters are nested too deeply.", "tools") from exc
    chain = message_chain(request.messages)
    return Prompt(
        request,
        token_ids,
        StopConditions(
            max_tokens=_max_tokens(request, len(token_ids), capabilities, default_max_tokens),
            strings=request.stop_strings,
            token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
        ),
        beyond_first_user(request.messages, chain),
        chain[-1],
    )


def _max_tokens(request: ChatRequest, prompt: int, capabilities: Capabilities, default: int | None) -> int:
    """What the client asked for, at most what context and cache leave; an answer needs room for one token."""
    longest = min(capabilities.max_prompt_tokens, capabilities.context_length - 1)
    if prompt > longest:
        message = (
            f"This model's context is {capabilities.context_length} tokens, of which a prompt may take {longest}; "
            f"your messages came to {prompt} tokens. Shorten them."
        )
        raise InvalidRequest(message, "messages", "context_length_exceeded")
    room = longest + 1 - prompt
    return min(request.max_tokens or default or room, room)

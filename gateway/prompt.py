"""From a request's body to what the engine is given; pure, so that large ones can be prepared off the event loop."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.messages import Message, Tool
from redraft.engine.chat.renderer import RenderError
from redraft.engine.types import Capabilities, StopConditions
from redraft.gateway.answer_format import Grammar
from redraft.gateway.chat_request import parse_chat_request
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.generation import Generation
from redraft.gateway.sessions import Link, beyond_first_user, message_chain
from redraft.gateway.text_request import DEFAULT_MAX_TOKENS, parse_text_request


class Prompt(Struct, frozen=True):
    """One prompt, when answers to it end, and the text that they begin with."""

    token_ids: tuple[int, ...]
    stopping: StopConditions
    echo: str = ""


class Prepared(Struct, frozen=True, kw_only=True):
    """A checked request, its prompts, and where its messages stand in a session.

    ``links`` are the message chain beyond the first user message, ``end`` its last link; texts have none.
    """

    generation: Generation
    prompts: tuple[Prompt, ...]
    tools: bool = False
    grammar: Grammar | None = None
    links: Sequence[Link] = ()
    end: Link | None = None


def prepare_chat(
    body: bytes, chat: ChatEncoder, capabilities: Capabilities, default_max_tokens: int | None
) -> Prepared:
    """Parse, render, tokenize and check the length; raises ApiError."""
    request = parse_chat_request(body, capabilities)
    if request.grammar is not None and not capabilities.constrained_decoding:
        param = request.grammar.param
        raise InvalidRequest(f"{param} needs constrained decoding, which is not available.", param, "unsupported_value")
    token_ids = encode_chat(chat, request.messages, request.tools)
    chain = message_chain(request.messages)
    return Prepared(
        generation=request.generation,
        prompts=(
            Prompt(token_ids, _stopping(request.generation, token_ids, capabilities, default_max_tokens, "messages")),
        ),
        tools=bool(request.tools),
        grammar=request.grammar,
        links=beyond_first_user(request.messages, chain),
        end=chain[-1],
    )


def prepare_text(body: bytes, chat: ChatEncoder, capabilities: Capabilities) -> Prepared:
    """Parse, tokenize and check the lengths; raises ApiError. Several prompts without a seed share a drawn one."""
    request = parse_text_request(body, capabilities)
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            text = prompt
            token_ids = tuple(chat.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens))
        else:
            text, token_ids = chat.tokenizer.decode(prompt, skip_special_tokens=False), prompt
        if not token_ids:
            raise InvalidRequest("A prompt is empty; send at least one token.", "prompt")
        stopping = _stopping(request.generation, token_ids, capabilities, DEFAULT_MAX_TOKENS, "prompt")
        prompts.append(Prompt(token_ids, stopping, text if request.echo else ""))
    generation = request.generation
    if len(prompts) > 1 and generation.sampling.seed is None:
        sampling = msgspec.structs.replace(generation.sampling, seed=secrets.randbits(63))
        generation = msgspec.structs.replace(generation, sampling=sampling)
    return Prepared(generation=generation, prompts=tuple(prompts))


def encode_chat(
    chat: ChatEncoder, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Token ids of a conversation; raises ApiError where the template cannot render it."""
    try:
        return chat.encode_chat(messages, tools, add_generation_prompt)
    except RenderError as exc:
        raise InvalidRequest(str(exc), "messages") from exc
    except RecursionError as exc:
        raise InvalidRequest("A tool's parameters are nested too deeply.", "tools") from exc


def _stopping(
    generation: Generation, token_ids: tuple[int, ...], capabilities: Capabilities, default: int | None, param: str
) -> StopConditions:
    """As the client asked, within what context and cache leave; an answer needs room for one token."""
    longest = min(capabilities.max_prompt_tokens, capabilities.context_length - 1)
    if len(token_ids) > longest:
        message = (
            f"This model's context is {capabilities.context_length} tokens, of which a prompt may take {longest}; "
            f"your {param} came to {len(token_ids)} tokens. Shorten the {param}."
        )
        raise InvalidRequest(message, param, "context_length_exceeded")
    room = longest + 1 - len(token_ids)
    return StopConditions(
        max_tokens=min(generation.max_tokens or default or room, room),
        strings=generation.stop_strings,
        token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
    )

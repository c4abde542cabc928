"""OpenAI's text completion request: its JSON, checked."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from redraft.engine.types import MAX_CHOICES, Capabilities
from redraft.gateway.decoding import BodyDecoder
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.generation import (
    Generation,
    GenerationFields,
    TokenId,
    check_token_ids,
    generation,
)
from redraft.gateway.parameters import TEXT_PARAMETERS

DEFAULT_MAX_TOKENS = 16


class TextCompletionRequest(GenerationFields, kw_only=True):
    """The body of a text completion request: one prompt or several, as text or as token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class TextRequest(Struct, frozen=True, kw_only=True):
    """Prompts to be continued; ``echo`` begins each answer with its prompt."""

    prompts: tuple[str | tuple[int, ...], ...]
    add_special_tokens: bool
    echo: bool
    generation: Generation


TEXT_BODY = BodyDecoder(TextCompletionRequest, TEXT_PARAMETERS)


def parse_text_request(body: bytes, capabilities: Capabilities) -> TextRequest:
    """Check everything that can be known without the prompt's tokens; raises ApiError."""
    wire = TEXT_BODY.decode(body, capabilities)
    if wire.echo and wire.logprobs is not None:
        message = "echo together with logprobs is not supported: the prompt's tokens have no log-probabilities here."
        raise InvalidRequest(message, "echo", "unsupported_value")
    prompts = _prompts(wire.prompt)
    if len(prompts) * (wire.n or 1) > MAX_CHOICES:
        message = f"{len(prompts)} prompts times n = {wire.n or 1} are more than {MAX_CHOICES} choices."
        raise InvalidRequest(message, "prompt")
    for prompt in prompts:
        check_token_ids(() if isinstance(prompt, str) else prompt, capabilities, "prompt")
    return TextRequest(
        prompts=prompts,
        add_special_tokens=wire.add_special_tokens is not False,
        echo=bool(wire.echo),
        generation=generation(wire, capabilities, max_tokens=wire.max_tokens, logprobs=wire.logprobs),
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    id_lists = [tuple(item) for item in prompt if isinstance(item, list)]
    match bool(texts), bool(ids), bool(id_lists):
        case True, False, False:
            return tuple(texts)
        case False, True, False:
            return (tuple(ids),)
        case False, False, True:
            return tuple(id_lists)
        case False, False, False:
            raise InvalidRequest("prompt is an empty list.", "prompt")
        case _:
            message = "prompt mixes kinds; send a string, strings, token ids, or lists of token ids."
            raise InvalidRequest(message, "prompt")

"""Text and conversations to token ids and back, for clients that count or cut before they ask."""

from __future__ import annotations

from msgspec import Struct

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.types import Capabilities
from redraft.gateway.conversation import ChatMessage, ToolDefinition, messages_of, tools_of
from redraft.gateway.decoding import BodyDecoder
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.generation import TokenId, check_model, check_token_ids
from redraft.gateway.logprobs import token_string
from redraft.gateway.prompt import encode_chat


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """A text, or a conversation as a chat completion would take it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class Tokens(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


class Text(Struct, frozen=True):
    prompt: str


TOKENIZE_BODY = BodyDecoder(TokenizeRequest)
DETOKENIZE_BODY = BodyDecoder(DetokenizeRequest)


def tokenize(body: bytes, chat: ChatEncoder, capabilities: Capabilities) -> Tokens:
    """The ids that a completion would take as its prompt; raises ApiError."""
    wire = TOKENIZE_BODY.decode(body, capabilities)
    _check_model(wire.model, capabilities)
    ids = _ids(wire, chat)
    strings = [token_string(chat.tokenizer, id_) for id_ in ids] if wire.return_token_strs else None
    return Tokens(ids, len(ids), capabilities.context_length, strings)


def detokenize(body: bytes, chat: ChatEncoder, capabilities: Capabilities) -> Text:
    """The text of token ids, control tokens included; raises ApiError."""
    wire = DETOKENIZE_BODY.decode(body, capabilities)
    _check_model(wire.model, capabilities)
    check_token_ids(wire.tokens, capabilities, "tokens")
    return Text(chat.tokenizer.decode(wire.tokens, skip_special_tokens=False))


def _check_model(model: str | None, capabilities: Capabilities) -> None:
    if model is not None:
        check_model(model, capabilities)


def _ids(wire: TokenizeRequest, chat: ChatEncoder) -> list[int]:
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("Send either prompt or messages.", "prompt")
    if wire.messages is None:
        assert wire.prompt is not None
        for name in ("tools", "add_generation_prompt"):
            if getattr(wire, name) is not None:
                raise InvalidRequest(f"{name} goes with messages, not with prompt.", name)
        return chat.tokenizer.encode(wire.prompt, add_special_tokens=wire.add_special_tokens is not False)
    if wire.add_special_tokens:
        raise InvalidRequest("Conversations get their control tokens from the template.", "add_special_tokens")
    messages, tools = messages_of(wire.messages), tools_of(wire.tools or ())
    return list(encode_chat(chat, messages, tools, add_generation_prompt=wire.add_generation_prompt is not False))

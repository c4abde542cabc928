"""Messages and tools as clients send them, to those of a conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.engine.chat.renderer import ROLES
from redraft.gateway.errors import InvalidRequest

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ContentPart(Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None
    refusal: Any = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """``parsed_arguments`` is what the openai client made of ``arguments``; it sends both back."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class MessageToolCall(Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    custom: Any = None
    index: int | None = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """``parsed`` is what the openai client made of ``content``; it sends both back."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    parsed: Any = None


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
    function: FunctionDefinition | None = None
    custom: Any = None


def messages_of(wire: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Raises ApiError that names the message to blame, as ``messages[2].content``."""
    if not wire:
        raise InvalidRequest("messages must hold at least one message.", "messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(wire))


def tools_of(wire: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    """Raises ApiError that names the tool to blame, as ``tools[2].function.name``."""
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(wire))
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("Two tools have the same name.", "tools")
    return tools


def _message(wire: ChatMessage, where: str) -> Message:
    if wire.role not in ROLES:
        raise InvalidRequest(f"Unknown role {wire.role[:64]!r}; roles are {', '.join(ROLES)}.", f"{where}.role")
    if wire.tool_calls and wire.role != "assistant":
        raise InvalidRequest("Only assistant messages have tool_calls.", f"{where}.tool_calls")
    if wire.role == "tool" and not wire.tool_call_id:
        raise InvalidRequest("A tool message needs the tool_call_id it answers.", f"{where}.tool_call_id")
    if wire.role != "tool" and wire.tool_call_id is not None:
        raise InvalidRequest("Only tool messages have a tool_call_id.", f"{where}.tool_call_id")
    if wire.content is None and wire.role != "assistant":
        raise InvalidRequest(f"A {wire.role} message needs content.", f"{where}.content")
    if wire.reasoning and wire.reasoning_content and wire.reasoning != wire.reasoning_content:
        raise InvalidRequest("reasoning and reasoning_content differ; send one of them.", f"{where}.reasoning")
    return Message(
        role=wire.role,
        content=_content(wire.content, where),
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(wire.tool_calls or ())),
        tool_call_id=wire.tool_call_id,
        name=wire.name,
        reasoning=wire.reasoning_content or wire.reasoning or None,
    )


def _content(content: str | list[ContentPart] | None, where: str) -> str | None:
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            message = f"Content parts of type {part.type[:64]!r} are not supported; send text."
            raise InvalidRequest(message, f"{where}.content[{i}].type", "unsupported_value")
        if part.text is None:
            raise InvalidRequest("A text part needs its text.", f"{where}.content[{i}].text")
    return "".join(part.text or "" for part in content)


def _tool_call(wire: MessageToolCall, where: str) -> ToolCall:
    if wire.type != "function" or wire.function is None:
        raise InvalidRequest("Only calls of type 'function' are supported.", where, "unsupported_value")
    return ToolCall(id=wire.id, name=wire.function.name, arguments=wire.function.arguments)


def _tool(wire: ToolDefinition, where: str) -> Tool:
    if wire.type != "function" or wire.function is None:
        raise InvalidRequest("Only tools of type 'function' are supported.", where, "unsupported_value")
    function = wire.function
    if not _TOOL_NAME.fullmatch(function.name):
        message = "Tool names take 1 to 64 letters, digits, and any of _ . and -."
        raise InvalidRequest(message, f"{where}.function.name")
    return Tool(function.name, function.description, function.parameters, bool(function.strict))

"""A conversation, as the chat API, the renderer and training all see it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class ToolCall(Struct, frozen=True):
    """A call the model made; ``arguments`` is the JSON text exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


class Tool(Struct, frozen=True):
    """A function the model may call; ``parameters`` is a JSON schema, None for a function without any.

    ``strict`` asks that every call's arguments follow the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Message(Struct, frozen=True):
    """One turn; ``role`` is system, developer, user, assistant or tool.

    ``content`` None is normal on an assistant's message that calls tools. ``tool_call_id`` says which call a tool
    message answers. ``reasoning`` is what an assistant thought before its content.
    """

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

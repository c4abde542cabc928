"""Messages to text, through the checkpoint's own chat template; what it cannot render is refused, never dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.engine.checkpoints.checkpoint import chat_template, read_json
from redraft.engine.checkpoints.errors import CheckpointError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_STRING_ARGUMENTS = re.compile(r"arguments\s+is\s+string")
_MESSAGE_NAME = re.compile(r"message\.name|message\[['\"]name['\"]\]|message\.get\(['\"]name['\"]")


class RenderError(ValueError):
    """A conversation that the chat template cannot render whole; the message is for whoever sent it."""


@dataclass(frozen=True)
class ChatContext:
    """What a template sees: ``messages`` and ``tools`` in the OpenAI shape, as plain JSON values."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class _GenerationBlock(Extension):
    """``{% generation %}``, with which some templates mark the assistant's text for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers' ``apply_chat_template`` sets it up (``utils/chat_template_utils.py``)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Renderer:
    """Renders conversations with one chat template."""

    def __init__(self, template: str, *, special_tokens: dict[str, str] | None = None, where: str = "template") -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(template)
            variables = find_undeclared_variables(environment.parse(template))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"The chat template of {where} is broken: {error}.") from error
        self._special_tokens = special_tokens or {}
        self._knows_tools = "tools" in variables
        self._knows_tool_calls = "tool_calls" in template
        self._knows_developer = "developer" in template
        self._knows_reasoning = "reasoning_content" in template
        self._knows_message_name = _MESSAGE_NAME.search(template) is not None
        self._takes_string_arguments = _STRING_ARGUMENTS.search(template) is not None

    @classmethod
    def from_folder(cls, folder: Path) -> Renderer:
        template = chat_template(folder)
        if template is None:
            raise CheckpointError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "the model is not made to chat. Use its instruct version."
            )
        return cls(template, special_tokens=_special_tokens(folder / "tokenizer_config.json"), where=str(folder))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text; ``add_generation_prompt`` opens the assistant's turn at its end."""
        return self.render_context(self.context(messages, tools), add_generation_prompt)

    def context(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> ChatContext:
        """Check a conversation and put it as templates expect it."""
        if not messages:
            raise RenderError("messages is empty; at least one message is needed.")
        if tools and not self._knows_tools:
            raise RenderError("This model's chat template has no place for tools; send the request without tools.")
        calls: dict[str, str] = {}
        return ChatContext(
            [self._message(message, i, calls) for i, message in enumerate(messages)], [_tool(tool) for tool in tools]
        )

    def render_context(self, context: ChatContext, add_generation_prompt: bool = True) -> str:
        """Render what ``context`` returned, and make sure that all of it is there."""
        try:
            text = self._template.render(
                messages=context.messages,
                tools=context.tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError("The messages hold a lone surrogate, which is not valid Unicode.") from error
        except jinja2.TemplateError as error:
            raise RenderError(f"This model's chat template refuses the conversation: {error.message}") from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise RenderError(f"This model's chat template cannot render the conversation: {error}.") from error
        _check_nothing_is_lost(text, context)
        return text

    def _message(self, message: Message, i: int, calls: dict[str, str]) -> dict[str, Any]:
        if message.role not in ROLES:
            raise RenderError(f"messages[{i}] has the unknown role {message.role!r}; known are {', '.join(ROLES)}.")
        if message.content is None and not message.tool_calls:
            raise RenderError(f"messages[{i}] has neither content nor tool calls.")
        if message.tool_calls and message.role != "assistant":
            raise RenderError(f"messages[{i}]: only assistant messages can call tools.")
        if message.name is not None and message.role != "tool" and not self._knows_message_name:
            raise RenderError(f"messages[{i}] has a name, for which this model's chat template has no place.")
        if message.reasoning is not None and (message.role != "assistant" or not self._knows_reasoning):
            raise RenderError(f"messages[{i}] has reasoning, for which this model's chat template has no place.")
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        rendered: dict[str, Any] = {"role": role, "content": message.content or ""}
        if message.name is not None:
            rendered["name"] = message.name
        if message.reasoning is not None:
            rendered["reasoning_content"] = message.reasoning
        if message.role == "tool":
            self._answer(message, i, calls, rendered)
        if message.tool_calls:
            if not self._knows_tool_calls:
                raise RenderError(f"messages[{i}] calls tools, for which this model's chat template has no place.")
            rendered["tool_calls"] = [self._tool_call(call, i, j) for j, call in enumerate(message.tool_calls)]
            calls.update({call.id: call.name for call in message.tool_calls})
        return rendered

    def _answer(self, message: Message, i: int, calls: dict[str, str], rendered: dict[str, Any]) -> None:
        if not calls:
            raise RenderError(f"messages[{i}] is a tool's answer, but no message before it calls a tool.")
        if message.tool_call_id is None:
            return
        if message.tool_call_id not in calls:
            raise RenderError(
                f"messages[{i}] answers the tool call {message.tool_call_id!r}, which no message before it made."
            )
        rendered["tool_call_id"] = message.tool_call_id
        rendered.setdefault("name", calls[message.tool_call_id])

    def _tool_call(self, call: ToolCall, i: int, j: int) -> dict[str, Any]:
        arguments = call.arguments
        if not self._takes_string_arguments:
            try:
                arguments = json.loads(call.arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise RenderError(f"messages[{i}].tool_calls[{j}]: arguments is not JSON ({error}).") from error
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _special_tokens(config_file: Path) -> dict[str, str]:
    config = read_json(config_file) if config_file.exists() else {}
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def _check_nothing_is_lost(text: str, context: ChatContext) -> None:
    """Every tool and every content must be in the text; contents in order, but for system texts, which may move."""
    for tool in context.tools:
        if _find(text, tool["function"]["name"], 0) is None:
            raise RenderError(f"This model's chat template leaves out the tool {tool['function']['name']!r}.")
    start = 0
    for i, message in enumerate(context.messages):
        # What an assistant thought in earlier turns is left out by design in templates of reasoning models.
        said = message["content"].rpartition("</think>")[2] if message["role"] == "assistant" else message["content"]
        moves = message["role"] in ("system", "developer")
        found = _find(text, said, 0 if moves else start)
        if found is None:
            raise RenderError(
                f"This model's chat template leaves out the content of messages[{i}] ({message['role']} message)."
            )
        ends = [start if moves else found]
        for call in message.get("tool_calls", ()):
            called = _find(text, call["function"]["name"], start)
            if called is None:
                raise RenderError(f"This model's chat template leaves out a tool call of messages[{i}].")
            ends.append(called)
        start = max(ends)


def _find(text: str, content: str, start: int) -> int | None:
    """Where ``content`` ends in ``text`` after ``start``: as it is but for outer blanks, or as a JSON string."""
    forms = {content.strip(), _to_json(content)[1:-1], _to_json(content, ensure_ascii=True)[1:-1]}
    found = ((text.find(form, start), len(form)) for form in forms)
    return min((position + length for position, length in found if position >= 0), default=None)

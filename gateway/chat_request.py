"""OpenAI's chat completion request: its JSON, checked, becomes the one internal request."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.engine.types import Capabilities, SamplingParams
from redraft.gateway.errors import ApiError, InvalidRequest
from redraft.gateway.parameters import check_parameters

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES = 128


class ChatRequest(Struct, frozen=True, kw_only=True):
    """What a client asks for, whatever protocol it came in; ``max_tokens`` None means as many as fit."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    sampling: SamplingParams
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    speculation: bool
    stream: bool
    include_usage: bool
    return_statistics: bool


class _Part(Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: Any = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class _CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _ToolCall(Struct, forbid_unknown_fields=True):
    id: str
    function: _CalledFunction | None = None
    type: str = "function"
    custom: Any = None
    index: int | None = None


class _Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, forbid_unknown_fields=True):
    type: str
    function: _Function | None = None
    custom: Any = None


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _RedraftOptions(Struct, forbid_unknown_fields=True):
    speculation: bool | None = None
    return_statistics: bool | None = None


_TokenCount = Annotated[int, Meta(ge=1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Body(Struct):
    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: _TokenCount | None = None
    max_completion_tokens: _TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    redraft: _RedraftOptions | None = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BODY = msgspec.json.Decoder(_Body)
_AT = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<where>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def parse_chat_request(body: bytes, capabilities: Capabilities) -> ChatRequest:
    """Check everything that can be known without the prompt's tokens; raises ApiError.

    Pure and safe off the event loop. Nothing a client sent is dropped: a field is used, inert by the table in
    ``parameters``, or refused by name.
    """
    try:
        body.decode()
        check_parameters(_FIELDS.decode(body), capabilities.parameters)
        wire = _BODY.decode(body)
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"The request body is not UTF-8 (at byte {exc.start}).", code="invalid_json") from exc
    except RecursionError as exc:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from exc
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from exc
    except msgspec.DecodeError as exc:
        raise InvalidRequest(_not_json(body, str(exc)), code="invalid_json") from exc
    return _request(wire, capabilities)


def _request(wire: _Body, capabilities: Capabilities) -> ChatRequest:
    if wire.model != capabilities.model_name:
        message = f"The model {wire.model!r} does not exist here; this server serves {capabilities.model_name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")
    if not wire.messages:
        raise InvalidRequest("messages must hold at least one message.", "messages")
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")
    if any(id_ >= capabilities.vocab_size for id_ in wire.stop_token_ids or ()):
        raise InvalidRequest(f"Token ids here are below {capabilities.vocab_size}.", "stop_token_ids")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(wire.tools or ()))
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("Two tools have the same name.", "tools")
    redraft = wire.redraft or _RedraftOptions()
    return ChatRequest(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(wire.messages)),
        tools=tools if _may_call_tools(wire) else (),
        sampling=_sampling(wire, capabilities),
        max_tokens=_max_tokens(wire),
        stop_strings=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        n=wire.n or 1,
        speculation=redraft.speculation is not False,
        stream=bool(wire.stream),
        include_usage=wire.stream_options is not None and bool(wire.stream_options.include_usage),
        return_statistics=bool(redraft.return_statistics),
    )


def _sampling(wire: _Body, capabilities: Capabilities) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if wire.temperature is None else wire.temperature,
        top_p=1.0 if wire.top_p is None else wire.top_p,
        top_k=min(max(wire.top_k or 0, 0), capabilities.vocab_size),
        min_p=wire.min_p or 0.0,
        seed=wire.seed,
    )


def _max_tokens(wire: _Body) -> int | None:
    if wire.max_tokens and wire.max_completion_tokens and wire.max_tokens != wire.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them.", "max_tokens")
    return wire.max_completion_tokens or wire.max_tokens


def _may_call_tools(wire: _Body) -> bool:
    match wire.tool_choice:
        case None | "auto":
            return True
        case "none":
            return False
        case "required" | {"type": "function"}:
            raise InvalidRequest(
                "tool_choice can be auto or none here; forcing a call is not supported.",
                "tool_choice",
                "unsupported_value",
            )
        case _:
            raise InvalidRequest("tool_choice can be auto or none here.", "tool_choice")


def _message(wire: _Message, where: str) -> Message:
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
    return Message(
        role=wire.role,
        content=_content(wire.content, where),
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(wire.tool_calls or ())),
        tool_call_id=wire.tool_call_id,
        name=wire.name,
    )


def _content(content: str | list[_Part] | None, where: str) -> str | None:
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            message = f"Content parts of type {part.type[:64]!r} are not supported; send text."
            raise InvalidRequest(message, f"{where}.content[{i}].type", "unsupported_value")
        if part.text is None:
            raise InvalidRequest("A text part needs its text.", f"{where}.content[{i}].text")
    return "".join(part.text or "" for part in content)


def _tool_call(wire: _ToolCall, where: str) -> ToolCall:
    if wire.type != "function" or wire.function is None:
        raise InvalidRequest("Only calls of type 'function' are supported.", where, "unsupported_value")
    return ToolCall(id=wire.id, name=wire.function.name, arguments=wire.function.arguments)


def _tool(wire: _Tool, where: str) -> Tool:
    if wire.type != "function" or wire.function is None:
        raise InvalidRequest("Only tools of type 'function' are supported.", where, "unsupported_value")
    function = wire.function
    if not _TOOL_NAME.fullmatch(function.name):
        message = "Tool names take 1 to 64 letters, digits, and any of _ . and -."
        raise InvalidRequest(message, f"{where}.function.name")
    if function.strict:
        message = "strict tools are not supported; set strict to false."
        raise InvalidRequest(message, f"{where}.function.strict", "unsupported_value")
    return Tool(name=function.name, description=function.description, parameters=function.parameters)


def _invalid(detail: str) -> InvalidRequest:
    """A message and a field name out of msgspec's ``<what> - at `$.a[0].b```."""
    match = _AT.fullmatch(detail)
    assert match is not None
    what, where = match["what"], match["where"] or ""
    if field := _FIELD.fullmatch(what):
        param = ".".join(filter(None, (where, field["name"])))[:256]
        if field["problem"] == "missing required":
            return InvalidRequest(f"{param} is required.", param, "missing_required_parameter")
        return InvalidRequest(f"Unknown parameter {param!r}.", param, "unknown_parameter")
    what = f"{where or 'The request body'}: {what[0].lower()}{what[1:]}.".replace("`", "")
    return InvalidRequest(what, where or None, "invalid_type" if ", got" in what else "invalid_value")


def _not_json(body: bytes, detail: str) -> str:
    for name in (b"NaN", b"Infinity"):
        if name in body:
            return f"The request body is not JSON: {detail}. JSON has no {name.decode()}; send a number or null."
    if re.search(rb"\\u[dD][89a-fA-F]", body):
        return f"The request body is not JSON: {detail}. Surrogate escapes (\\ud800 to \\udfff) come in pairs."
    return f"The request body is not JSON: {detail}."

"""What becomes of each request parameter: the one table that says which are honoured, inert or refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from redraft.engine.types import Capabilities
from redraft.gateway.errors import InvalidRequest

Handling = Literal["gateway", "engine", "constrained", "logprobs", "inert", "refused"]


class Parameter(msgspec.Struct, frozen=True):
    """How a parameter is handled, and the values that ask for nothing and so always pass (null is one of them).

    ``gateway``: honoured here. ``engine``: honoured where the engine's capabilities name it, else refused.
    ``constrained``, ``logprobs``: honoured where the engine is capable of that, else refused. ``inert``: cannot change
    an answer, so it is accepted and unused. ``refused``: a 400 that names it.
    """

    handling: Handling
    neutral: tuple[Any, ...] = ()


_GATEWAY = Parameter("gateway")
_INERT = Parameter("inert")
_REFUSED = Parameter("refused")


def _engine(*neutral: Any) -> Parameter:
    return Parameter("engine", neutral)


def _refused(*neutral: Any) -> Parameter:
    return Parameter("refused", neutral)


_SHARED: Mapping[str, Parameter] = {
    "model": _GATEWAY,
    "max_tokens": _GATEWAY,
    "stream": _GATEWAY,
    "stream_options": _GATEWAY,
    "redraft": _GATEWAY,
    "n": _engine(1),
    "temperature": _engine(),
    "top_p": _engine(1),
    "top_k": _engine(0, -1),
    "min_p": _engine(0),
    "presence_penalty": _engine(0),
    "frequency_penalty": _engine(0),
    "repetition_penalty": _engine(1),
    "logit_bias": _engine({}),
    "seed": _engine(),
    "stop": _engine([]),
    "stop_token_ids": _engine([]),
    "ignore_eos": _engine(False),
    "user": _INERT,
    "best_of": _refused(1),
    "use_beam_search": _refused(False),
    "length_penalty": _refused(1),
    "min_tokens": _refused(0),
    "bad_words": _refused([]),
    "skip_special_tokens": _refused(True),
    "spaces_between_special_tokens": _refused(True),
    "include_stop_str_in_output": _refused(False),
    "guided_json": _REFUSED,
    "guided_regex": _REFUSED,
    "guided_choice": _REFUSED,
    "guided_grammar": _REFUSED,
    "structured_outputs": _REFUSED,
    "logits_processors": _refused([]),
}

CHAT_PARAMETERS: Mapping[str, Parameter] = {
    **_SHARED,
    "messages": _GATEWAY,
    "tools": _GATEWAY,
    "tool_choice": _GATEWAY,
    "parallel_tool_calls": _GATEWAY,
    "max_completion_tokens": _GATEWAY,
    "response_format": Parameter("constrained", ({"type": "text"},)),
    "logprobs": Parameter("logprobs", (False,)),
    "top_logprobs": Parameter("logprobs", (0,)),
    "metadata": _INERT,
    "safety_identifier": _INERT,
    "prompt_cache_key": _INERT,
    "prompt_cache_options": _INERT,
    "prompt_cache_retention": _INERT,
    "modalities": _refused(["text"]),
    "audio": _REFUSED,
    "prediction": _REFUSED,
    "web_search_options": _REFUSED,
    "moderation": _REFUSED,
    "reasoning_effort": _refused("none"),
    "verbosity": _refused("medium"),
    "service_tier": _refused("auto", "default"),
    "store": _refused(False),
    "functions": _refused([]),
    "function_call": _refused("none"),
    "echo": _refused(False),
    "add_generation_prompt": _refused(True),
    "continue_final_message": _refused(False),
    "chat_template": _REFUSED,
    "chat_template_kwargs": _refused({}),
    "documents": _refused([]),
}

TEXT_PARAMETERS: Mapping[str, Parameter] = {
    **_SHARED,
    "prompt": _GATEWAY,
    "echo": _GATEWAY,
    "add_special_tokens": _GATEWAY,
    "logprobs": Parameter("logprobs"),
    "suffix": _refused(""),
    "response_format": _refused({"type": "text"}),
    "prompt_logprobs": _refused(0),
}

_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "continue_final_message": "end the messages with the one to be answered",
}
_LONGEST_NEUTRAL = 64


def check_parameters(
    fields: Mapping[str, msgspec.Raw], parameters: Mapping[str, Parameter], capabilities: Capabilities
) -> None:
    """Refuse, by name, every field that would otherwise be ignored; ``fields`` are the top-level ones, undecoded."""
    for name, raw in fields.items():
        parameter = parameters.get(name)
        if parameter is None:
            near = difflib.get_close_matches(name[:64], parameters, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise InvalidRequest(f"Unknown parameter {name[:64]!r}{hint}", name[:64], "unknown_parameter")
        if not _is_honoured(name, parameter, capabilities) and not _is_neutral(bytes(raw), parameter):
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            but = "".join(f" or {msgspec.json.encode(value).decode()}" for value in parameter.neutral)
            message = f"The parameter {name} is not supported here{instead}. Leave it out, or send null{but}."
            raise InvalidRequest(message, name, "unsupported_parameter")


def _is_honoured(name: str, parameter: Parameter, capabilities: Capabilities) -> bool:
    match parameter.handling:
        case "gateway" | "inert":
            return True
        case "engine":
            return name in capabilities.parameters
        case "constrained":
            return capabilities.constrained_decoding
        case "logprobs":
            return capabilities.logprobs
        case "refused":
            return False


def _is_neutral(raw: bytes, parameter: Parameter) -> bool:
    if raw == b"null":
        return True
    if len(raw) > _LONGEST_NEUTRAL:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in parameter.neutral
    )

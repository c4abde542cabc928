"""What becomes of each request parameter: the one table that says which are honoured, inert or refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from redraft.gateway.errors import InvalidRequest

Handling = Literal["gateway", "engine", "inert", "refused"]


class Parameter(msgspec.Struct, frozen=True):
    """How a parameter is handled, and the values that ask for nothing and so always pass (null is one of them).

    ``gateway``: honoured here. ``engine``: honoured where the engine's capabilities name it, else refused.
    ``inert``: cannot change an answer, so it is accepted and unused. ``refused``: a 400 that names it.
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


CHAT_PARAMETERS: Mapping[str, Parameter] = {
    "model": _GATEWAY,
    "messages": _GATEWAY,
    "tools": _GATEWAY,
    "tool_choice": _GATEWAY,
    "max_tokens": _GATEWAY,
    "max_completion_tokens": _GATEWAY,
    "stream": _GATEWAY,
    "stream_options": _GATEWAY,
    "redraft": _GATEWAY,
    "n": _engine(1),
    "temperature": _engine(),
    "top_p": _engine(1),
    "top_k": _engine(0, -1),
    "min_p": _engine(0),
    "seed": _engine(),
    "stop": _engine([]),
    "stop_token_ids": _engine([]),
    "ignore_eos": _engine(False),
    "user": _INERT,
    "metadata": _INERT,
    "safety_identifier": _INERT,
    "prompt_cache_key": _INERT,
    "prompt_cache_options": _INERT,
    "prompt_cache_retention": _INERT,
    "frequency_penalty": _refused(0),
    "presence_penalty": _refused(0),
    "repetition_penalty": _refused(1),
    "logit_bias": _refused({}),
    "logprobs": _refused(False),
    "top_logprobs": _refused(0),
    "response_format": _refused({"type": "text"}),
    "parallel_tool_calls": _refused(True),
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
    "best_of": _refused(1),
    "use_beam_search": _refused(False),
    "length_penalty": _refused(1),
    "min_tokens": _refused(0),
    "bad_words": _refused([]),
    "skip_special_tokens": _refused(True),
    "spaces_between_special_tokens": _refused(True),
    "include_stop_str_in_output": _refused(False),
    "add_generation_prompt": _refused(True),
    "continue_final_message": _refused(False),
    "chat_template": _REFUSED,
    "chat_template_kwargs": _refused({}),
    "documents": _refused([]),
    "guided_json": _REFUSED,
    "guided_regex": _REFUSED,
    "guided_choice": _REFUSED,
    "guided_grammar": _REFUSED,
    "structured_outputs": _REFUSED,
    "logits_processors": _refused([]),
}

_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "continue_final_message": "end the messages with the one to be answered",
}
_LONGEST_NEUTRAL = 64


def check_parameters(fields: Mapping[str, msgspec.Raw], honoured: frozenset[str]) -> None:
    """Refuse, by name, every field that would otherwise be ignored.

    ``fields`` are the request's top-level fields, undecoded; ``honoured`` is ``Capabilities.parameters``.
    """
    for name, raw in fields.items():
        parameter = CHAT_PARAMETERS.get(name)
        if parameter is None:
            near = difflib.get_close_matches(name[:64], CHAT_PARAMETERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise InvalidRequest(f"Unknown parameter {name[:64]!r}{hint}", name[:64], "unknown_parameter")
        refused = parameter.handling == "refused" or (parameter.handling == "engine" and name not in honoured)
        if refused and not _is_neutral(bytes(raw), parameter):
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            but = "".join(f" or {msgspec.json.encode(value).decode()}" for value in parameter.neutral)
            message = f"The parameter {name} is not supported here{instead}. Leave it out, or send null{but}."
            raise InvalidRequest(message, name, "unsupported_parameter")


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

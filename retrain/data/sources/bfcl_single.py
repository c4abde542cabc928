"""BFCL's single-turn cases: one request, the calls that answer it, or a reply where no tool fits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from redraft.engine.chat.messages import Message, ToolCall
from redraft.retrain.data.closings import no_tool_fits
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.sources.bfcl import answers, case_tools, cases

_CALLING = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
_REFUSING = ("irrelevance", "live_irrelevance")
_OPEN = ("live_relevance",)
_LIVE_ID = re.compile(r"(live_(?!irr)\w+_)\d+-(\d+)-\d+")


def conversations() -> Iterator[Conversation]:
    """Every case; in the open category any call may be right, so that no answer is given."""
    for category in (*_CALLING, *_REFUSING, *_OPEN):
        truths = answers(category) if category in _CALLING else {}
        for case in cases(category):
            tools = case_tools(case)
            messages = [Message(role=m["role"], content=m["content"]) for turn in case["question"] for m in turn]
            answer = None
            if category in _CALLING:
                text = "\n".join(message.content or "" for message in messages)
                answer = Message(role="assistant", content=None, tool_calls=_calls(truths[case["id"]], text))
            elif category in _REFUSING and tools:
                answer = Message(role="assistant", content=no_tool_fits(tools, case["id"]))
            yield Conversation(
                case["id"],
                "bfcl-single",
                _family(case["id"]),
                tools,
                (*messages, answer) if answer else tuple(messages),
                start=len(messages),
                truth=answer is not None,
            )


def _family(case: str) -> str:
    """Live cases are numbered case-functions-variant: variants over the same functions are one family.

    Those that no function fits have nothing in common but the functions that do not, and stand alone.
    """
    live = _LIVE_ID.fullmatch(case)
    return f"{live[1]}*-{live[2]}" if live else case


def _calls(truth: list[dict[str, dict[str, list[Any]]]], text: str) -> tuple[ToolCall, ...]:
    calls = ((name, arguments) for call in truth for name, arguments in call.items())
    return tuple(
        ToolCall(f"call_{i}", name, json.dumps(_arguments(arguments, text), ensure_ascii=False))
        for i, (name, arguments) in enumerate(calls)
    )


def _arguments(admissible: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The first admissible value of each argument; one that may be left out only where the user speaks of it."""
    chosen = {}
    for name, values in admissible.items():
        values = values if isinstance(values, list) else [values]
        value = next((value for value in values if value != ""), None)
        if value is None or ("" in values and str(value).lower() not in text.lower()):
            continue
        chosen[name] = _plain(value, text)
    return chosen


def _plain(value: Any, text: str) -> Any:
    """Values inside an object are lists of admissible ones, too."""
    if isinstance(value, dict):
        return _arguments(value, text)
    return [_plain(item, text) for item in value] if isinstance(value, list) else value

"""Whether an answer calls the tools that it should, and calls them well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from redraft.engine.chat.messages import Tool
from redraft.engine.chat.tool_calls import ContentDelta, ToolCallParser
from redraft.retrain.agent_target.prepared import PLAIN_SOURCES, SIMPLE, Case, category_of
from redraft.retrain.data.conversation import Source

_IGNORED = re.compile(r"[ ,./\-_*^]")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


class Call(Struct, frozen=True):
    """A call as it was written; ``arguments`` is None where that is no JSON object."""

    name: str
    arguments: dict[str, Any] | None


class Answer(Struct, frozen=True):
    """An answer taken apart as the gateway does it."""

    content: str
    calls: tuple[Call, ...]

    @property
    def is_malformed(self) -> bool:
        """Whether it tried to call and failed."""
        return "<tool_call>" in self.content or any(call.arguments is None for call in self.calls)


def take_apart(text: str) -> Answer:
    parser = ToolCallParser()
    content: list[str] = []
    names: list[str] = []
    arguments: list[str] = []
    for delta in (*parser.push(text), *parser.finish()):
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
            continue
        if delta.name is not None:
            names.append(delta.name)
            arguments.append("")
        arguments[-1] += delta.arguments
    calls = (Call(name, _json_object(text)) for name, text in zip(names, arguments, strict=True))
    return Answer("".join(content), tuple(calls))


def is_valid(answer: Answer, tools: Sequence[Tool]) -> bool:
    """One call or more, each of an offered tool, with arguments that the tool declares and that follow its schema."""
    schemas = {tool.name: tool.parameters or {"type": "object", "properties": {}} for tool in tools}
    return (
        bool(answer.calls)
        and not answer.is_malformed
        and all(call.name in schemas and follows(call.arguments, schemas[call.name]) for call in answer.calls)
    )


def follows(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of a schema of type, enum, properties, required and items, and has nothing undeclared."""
    kind = schema.get("type")
    if kind is not None and not _is_of(value, kind):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, dict) and "properties" in schema:
        properties = schema["properties"]
        return set(schema.get("required", ())) <= value.keys() <= properties.keys() and all(
            follows(item, properties[name]) for name, item in value.items()
        )
    if isinstance(value, list) and "items" in schema:
        return all(follows(item, schema["items"]) for item in value)
    return True


def is_correct(answer: Answer, case: Case) -> bool:
    """Valid, and the expected calls in any order, each argument among its admissible values.

    BFCL's rule (``ast_checker``): case, blanks and some punctuation of strings do not count, and an argument may be
    left out where ``""`` is admissible.
    """
    left = list(answer.calls)
    if not is_valid(answer, case.tools) or len(left) != len(case.calls):
        return False
    for name, admissible in case.calls:
        found = next((call for call in left if call.name == name and _match(call.arguments or {}, admissible)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def shares(answered: Sequence[tuple[Case, str]]) -> dict[str, float | None]:
    """Shares of some answers' texts, by what was asked: simple cases, other calls, or nothing to call."""
    simple: list[tuple[Case, Answer]] = []
    others: list[tuple[Case, Answer]] = []
    abstaining: list[tuple[Case, Answer]] = []
    for case, text in answered:
        group = abstaining if not case.calls else simple if category_of(case.id) in SIMPLE else others
        group.append((case, take_apart(text)))
    return {
        "simple_cases": len(simple),
        "valid_call_share": _share(is_valid(answer, case.tools) for case, answer in simple),
        "correct_call_share": _share(is_correct(answer, case) for case, answer in simple),
        "other_cases": len(others),
        "valid_call_share_other": _share(is_valid(answer, case.tools) for case, answer in others),
        "correct_call_share_other": _share(is_correct(answer, case) for case, answer in others),
        "irrelevant_cases": len(abstaining),
        "no_call_share": _share(not answer.calls and not answer.is_malformed for _, answer in abstaining),
    }


def looping_share(looping: Iterable[tuple[Source, bool]]) -> dict[str, float | None]:
    """Shares of answers that loop, to prompts as agents send them and to plain ones."""
    by_kind: dict[bool, list[bool]] = {True: [], False: []}
    for source, loops in looping:
        by_kind[source in PLAIN_SOURCES].append(loops)
    return {"looping_share_agent_prompts": _share(by_kind[False]), "looping_share_plain_prompts": _share(by_kind[True])}


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _match(arguments: Mapping[str, Any], admissible: Mapping[str, Any]) -> bool:
    """Whether each argument is one of its admissible values, a list or, inside some objects, a value alone."""
    listed = {name: values if isinstance(values, list) else [values] for name, values in admissible.items()}
    return arguments.keys() <= listed.keys() and all(
        any(_equal(arguments[name], value) for value in values) if name in arguments else "" in values
        for name, values in listed.items()
    )


def _equal(value: Any, admissible: Any) -> bool:
    if isinstance(value, str) and isinstance(admissible, str):
        return _plain(value) == _plain(admissible)
    if isinstance(value, dict) and isinstance(admissible, dict):
        return _match(value, admissible)
    if isinstance(value, list) and isinstance(admissible, list):
        return len(value) == len(admissible) and all(map(_equal, value, admissible))
    return isinstance(value, bool) == isinstance(admissible, bool) and bool(value == admissible)


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _share(outcomes: Iterable[bool]) -> float | None:
    outcomes = list(outcomes)
    return sum(outcomes) / len(outcomes) if outcomes else None

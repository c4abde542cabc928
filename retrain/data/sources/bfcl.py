"""The Berkeley Function-Calling Leaderboard (PyPI `bfcl-eval`, Apache-2.0): its files, and its tools as JSON schemas.

Tool schemas are compact. Those of multi-turn scenarios are the involved classes' functions, without the shared
preamble, the response schemas and the parameters' descriptions; single-turn cases bring their own functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from redraft.engine.chat.messages import Tool
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.sources.packages import package_folder

_REQUIREMENT = "bfcl-eval==2026.3.23"
_TYPES = {
    "dict": "object",
    "hashmap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "short": "integer",
    "byte": "integer",
    "bigint": "integer",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "any": "string",
    "char": "string",
}
_KNOWN_TYPES = {"object", "number", "integer", "array", "string", "boolean"}
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""The module of each simulated class, and the file that describes its functions, by the class's name."""


class AgentSession(Struct, frozen=True):
    """One multi-turn scenario: its tools, and the user's turns in order."""

    id: str
    tools: tuple[Tool, ...]
    turns: tuple[str, ...]


def sessions(category: str = "multi_turn_base") -> Iterator[AgentSession]:
    """All scenarios of one multi-turn category, in file order; turns that add no user text are left out."""
    for scenario in cases(category):
        turns = (message["content"] for turn in scenario["question"] for message in turn if message["role"] == "user")
        yield AgentSession(scenario["id"], scenario_tools(scenario), tuple(turns))


def cases(category: str) -> list[dict[str, Any]]:
    """The cases of one BFCL v4 category, in file order."""
    return _lines(_data() / f"BFCL_v4_{category}.json")


def answers(category: str) -> dict[str, list[Any]]:
    """Ground truth of a category by case id."""
    return {
        answer["id"]: answer["ground_truth"]
        for answer in _lines(_data() / "possible_answer" / f"BFCL_v4_{category}.json")
    }


def scenario_tools(scenario: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The functions of the classes that a multi-turn scenario involves, but for those it excludes."""
    excluded = scenario.get("excluded_function", ())
    functions = (
        function
        for name in scenario["involved_classes"]
        for function in _lines(_data() / "multi_turn_func_doc" / f"{MODULES[name]}.json")
    )
    return tuple(
        Tool(
            name=function["name"],
            description=function["description"].rpartition("Tool description: ")[2].strip(),
            parameters=_schema(function["parameters"], ("type", "enum", "required")),
        )
        for function in functions
        if function["name"] not in excluded
    )


def case_tools(case: Mapping[str, Any]) -> tuple[Tool, ...]:
    """A single-turn case's own functions."""
    return tuple(
        Tool(
            name=function["name"],
            description=function["description"],
            parameters=_schema(function["parameters"], ("type", "description", "enum", "required")),
        )
        for function in case["function"]
    )


def _schema(schema: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """BFCL's description of a value as JSON schema, with no more than ``keys``, properties and items."""
    kept = {key: schema[key] for key in keys if key in schema}
    kept["type"] = _type(str(schema.get("type", "string")).lower())
    if "properties" in schema:
        kept["properties"] = {name: _schema(value, keys) for name, value in schema["properties"].items()}
    if "items" in schema:
        kept["items"] = _schema(schema["items"], keys)
    return kept


def _type(name: str) -> str:
    name = _TYPES.get(name, name)
    return name if name in _KNOWN_TYPES else "string"


def _data() -> Path:
    return package_folder("bfcl_eval", _REQUIREMENT) / "data"


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise DataError(f"{file} is missing; run: pip install --force-reinstall --no-deps {_REQUIREMENT}") from None

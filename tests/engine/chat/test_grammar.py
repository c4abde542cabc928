"""A grammar takes what was asked for, all of it, and nothing else; and it says what it cannot enforce."""

from __future__ import annotations

import json
from typing import Any

import pytest

from redraft.engine.chat.grammar import (
    GrammarCompiler,
    arguments_constraint,
    json_constraint,
    problem_with,
    tool_call_constraint,
)
from redraft.engine.chat.messages import Tool
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.types import Constraint

pytestmark = pytest.mark.unit

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
TOOLS = [Tool("f", 'Adds "1".', NUMBER, strict=True), Tool("g")]
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {"any": [true, null]}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'


def takes(tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    """Whether ``text`` is a whole answer, told as an engine finds out: token by token, and then the end."""
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size).matcher(constraint)
    for id_ in [*tokenizer.encode_ordinary(text), *tokenizer.eos_ids]:
        if not matcher.compute_logit_bias()[id_]:
            return False
        matcher.consume_token(id_)
    return True


@pytest.mark.parametrize(
    ("text", "forced", "one", "free", "free_one", "or_json"),
    [
        (F, True, True, True, True, True),
        (G, True, True, True, True, True),
        (f"{F}\n{G}", True, False, True, False, True),
        (f"I look.\n{F}", False, False, True, True, False),
        ("Hello.", False, False, True, True, False),
        ("a <tool", False, False, True, True, False),
        ('{"x": 1.5}', False, False, True, True, True),
        ('{"x": "y"}', False, False, True, True, False),
        (WRONG, False, False, False, False, False),
        (f"{F}\n{WRONG}", False, False, False, False, False),
        ("a <tool_call> b", False, False, False, False, False),
        (f"{F} and more", False, False, False, False, False),
        (F[:-5], False, False, False, False, False),
        (F.replace('"f"', '"h"'), False, False, False, False, False),
    ],
)
def test_calls_of_tools_and_what_may_stand_instead(
    definition: str, text: str, forced: bool, one: bool, free: bool, free_one: bool, or_json: bool
) -> None:
    tokenizer = Tokenizer(definition, (2,))
    expected = {
        tool_call_constraint(TOOLS, parallel=True): forced,
        tool_call_constraint(TOOLS, parallel=False): one,
        tool_call_constraint(TOOLS, parallel=True, instead="text"): free,
        tool_call_constraint(TOOLS, parallel=False, instead="text"): free_one,
        tool_call_constraint(TOOLS, parallel=True, instead=ANSWER): or_json,
    }
    assert {constraint: takes(tokenizer, constraint, text) for constraint in expected} == expected
    assert all(problem_with(constraint) is None for constraint in expected)


@pytest.mark.parametrize(
    ("schema", "value", "valid"),
    [
        (NUMBER, {"a": -12}, True),
        (NUMBER, {"a": 1.5}, False),
        (NUMBER, {}, False),
        ({"type": "object"}, {"any": ["thing", {"é🙂": None}]}, True),
        ({"enum": ["red", "green", 3, None]}, 3, True),
        ({"enum": ["red", "green", 3, None]}, "blue", False),
        ({"type": "string", "maxLength": 3}, "abcd", False),
        ({"type": "string", "pattern": "^[a-z]+$"}, "abc", True),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, [True, False], True),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, [True], False),
        ({"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}},
         {"t": {"t": {}}}, True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, True),
    ],
)  # fmt: skip
def test_json_of_a_schema(definition: str, schema: dict[str, Any], value: Any, valid: bool) -> None:
    tokenizer = Tokenizer(definition, (2,))
    assert takes(tokenizer, json_constraint(schema), json.dumps(value, ensure_ascii=False)) == valid


def test_white_space_has_one_form_whatever_a_schema_says(definition: str) -> None:
    tokenizer = Tokenizer(definition, (2,))
    for schema in (NUMBER, {**NUMBER, "x-guidance": {"whitespace_flexible": True, "lenient": True}}):
        assert takes(tokenizer, json_constraint(schema), '{"a": 1}')
        assert not takes(tokenizer, json_constraint(schema), '{ "a":1 }')


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "strin"},
        {"type": "string", "format": "unheard-of"},
    ],
)
def test_what_cannot_be_enforced_is_said(schema: dict[str, Any]) -> None:
    problem = problem_with(json_constraint(schema))
    assert problem
    assert problem_with(arguments_constraint(Tool("f", None, schema, strict=True))) == problem


def test_tools_that_are_not_strict_are_enforced_as_far_as_possible(definition: str) -> None:
    tokenizer = Tokenizer(definition, (2,))
    items = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    union = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    schema = {"type": "object", "properties": {"a": items, "b": union}, "additionalProperties": False}
    loose = arguments_constraint(Tool("f", None, schema))
    assert problem_with(loose) is None
    assert takes(tokenizer, loose, '{"a": [1, 1], "b": 2}')
    assert not takes(tokenizer, loose, '{"a": ["1"]}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"type": "integer", "allOf": [{"multipleOf": number} for number in (97, 89, 83, 79)]},
        {"type": "number", "allOf": [{"multipleOf": 0.0001}, {"multipleOf": 9973}]},
        {"type": "integer", "multipleOf": 10**400},
        {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 9973} for i in range(20)}},
        {"enum": ["x" * 1000 + str(i) for i in range(200)]},
    ],
    ids=["large", "least common", "scaled", "huge", "many", "long"],
)
def test_a_grammar_that_would_take_long_to_build_is_refused_at_once(definition: str, schema: dict[str, Any]) -> None:
    constraint = json_constraint(schema)
    assert "allowed" in (problem_with(constraint) or "")
    with pytest.raises(ValueError, match="allowed"):
        GrammarCompiler(Tokenizer(definition, (2,)), 400).matcher(constraint)


@pytest.mark.parametrize("multiples", [(7,), (0.01, 0.01), (0.5, 60), (5,) * 10, (1000,)])
def test_multiples_as_people_use_them_are_enforced(definition: str, multiples: tuple[float, ...]) -> None:
    properties = {f"p{i}": {"type": "number", "multipleOf": multiple} for i, multiple in enumerate(multiples)}
    schema = {"type": "object", "properties": properties, "required": ["p0"]}
    tokenizer = Tokenizer(definition, (2,))
    assert takes(tokenizer, json_constraint(schema), json.dumps({"p0": multiples[0] * 3}))
    assert not takes(tokenizer, json_constraint(schema), json.dumps({"p0": multiples[0] / 2}))


def test_an_object_may_have_a_thousand_optional_properties(definition: str) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(1000)}}
    assert takes(Tokenizer(definition, (2,)), json_constraint(schema), '{"p3": true, "p999": false}')

"""An answer counts as a good call exactly when a client could execute it, and as correct when BFCL's rule says so."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.engine.chat.messages import Tool
from redraft.retrain.agent_target.prepared import Case
from redraft.retrain.agent_target.scoring import (
    Answer,
    Call,
    follows,
    is_correct,
    is_valid,
    looping_share,
    shares,
    take_apart,
)

pytestmark = pytest.mark.unit

WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    },
)
CLOCK = Tool("clock")
TRUTH = {"city": ["Paris", "Paris, France"], "days": [3], "unit": ["C", ""]}
CASE = Case("simple_python_7:1", (WEATHER, CLOCK), (("weather", TRUTH),))


def written(*calls: tuple[str, Any]) -> str:
    blocks = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def answer(*calls: tuple[str, Any]) -> Answer:
    return take_apart(written(*calls))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", ()),
        (written(("clock", {})), "", (Call("clock", {}),)),
        ("Let me see.\n" + written(("clock", {}), ("clock", {})), "Let me see.", (Call("clock", {}),) * 2),
        ('<tool_call>\n{"name": "clock"}\n</tool_call>', "", (Call("clock", {}),)),
    ],
)
def test_an_answer_is_taken_apart_as_the_gateway_does_it(text: str, content: str, calls: tuple[Call, ...]) -> None:
    assert take_apart(text) == Answer(content, calls)
    assert not take_apart(text).is_malformed


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nclock()\n</tool_call>",
        '<tool_call>\n{"name": "clock", "arguments": {"a": [1, 2',
        '<tool_call>\n{"name": "clock", "arguments": {"a": unquoted}}\n</tool_call>',
        written(("clock", {})) + "\n<tool_call>\n{",
    ],
)
def test_a_call_that_went_wrong_is_malformed_and_never_valid(text: str) -> None:
    assert take_apart(text).is_malformed
    assert not is_valid(take_apart(text), [CLOCK])


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([("weather", {"city": "Rome"})], True),
        ([("weather", {"city": "Rome", "days": 2, "unit": "F"}), ("clock", {})], True),
        ([], False),
        ([("weather", {})], False),
        ([("weather", {"city": "Rome", "days": "two"})], False),
        ([("weather", {"city": "Rome", "days": True})], False),
        ([("weather", {"city": "Rome", "unit": "K"})], False),
        ([("weather", {"city": "Rome", "when": "now"})], False),
        ([("clock", {"zone": "CET"})], False),
        ([("forecast", {"city": "Rome"})], False),
        ([("weather", {"city": "Rome"}), ("forecast", {})], False),
    ],
)
def test_a_valid_call_names_an_offered_tool_and_follows_its_schema(calls: list[tuple[str, Any]], valid: bool) -> None:
    assert is_valid(answer(*calls), [WEATHER, CLOCK]) is valid


SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "enum": ["a", "b"]},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "l": {"type": "array", "items": {"type": "boolean"}},
        "o": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "f": {"type": "object"},
    },
    "required": ["s"],
}
CLOSED = json.loads(json.dumps(SCHEMA).replace('"properties"', '"additionalProperties": false, "properties"'))
SCALARS = st.sampled_from(["a", "b", "c", 0, 1, 2.0, 2.5, True, None])
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.sampled_from("xy"), SCALARS, max_size=2))


@given(st.dictionaries(st.sampled_from("sinlofz"), VALUES, max_size=4))
def test_following_a_schema_is_what_jsonschema_says_of_closed_objects(value: dict[str, Any]) -> None:
    assert follows(value, SCHEMA) == jsonschema.Draft202012Validator(CLOSED).is_valid(value)


@pytest.mark.parametrize(
    ("arguments", "correct"),
    [
        ({"city": "Paris", "days": 3}, True),
        ({"city": "paris france", "days": 3, "unit": "C"}, True),
        ({"city": "Paris", "days": 3, "unit": "F"}, False),
        ({"city": "Paris"}, False),
        ({"city": "Lyon", "days": 3}, False),
    ],
)
def test_a_correct_call_has_admissible_arguments(arguments: dict[str, Any], correct: bool) -> None:
    assert is_correct(answer(("weather", arguments)), CASE) is correct


def test_a_correct_answer_makes_the_expected_calls_and_no_more_in_any_order() -> None:
    paris, clock = ("weather", {"city": "Paris", "days": 3}), ("clock", {})
    both = Case("parallel_1:1", (WEATHER, CLOCK), (("clock", {}), ("weather", TRUTH)))
    assert is_correct(answer(paris, clock), both)
    assert is_correct(answer(clock, paris), both)
    assert not is_correct(answer(paris), both)
    assert not is_correct(answer(paris, paris), both)
    assert not is_correct(answer(paris, clock), CASE)


@pytest.mark.parametrize(
    ("value", "admissible", "equal"),
    [
        ([1, 2], [[1, 2], [3]], True),
        ([2, 1], [[1, 2]], False),
        ("April 1, 2024", ["april 1 2024"], True),
        (5, [5.0], True),
        (1, [True], False),
        (True, [True], True),
        ("it's", ['it"s'], True),
        ({"a": 1}, [{"a": [1, 2], "b": [""]}], True),
        ({"a": 1}, [{"a": [1], "b": [2]}], False),
        ([{"a": "X"}], [[{"a": ["x"]}]], True),
        ({"a": 0.5}, [{"a": 0.5}], True),
    ],
)
def test_values_are_compared_as_bfcl_does(value: Any, admissible: list[Any], equal: bool) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"v": {}}})
    assert (
        is_correct(answer(("f", {"v": value})), Case("simple_python_1:1", (tool,), (("f", {"v": admissible}),)))
        is equal
    )


def test_shares_are_of_what_was_asked() -> None:
    good = written(("weather", {"city": "Paris", "days": 3}))
    wrong = written(("weather", {"city": "Rome"}))
    idle = Case("live_irrelevance_3-0-0:1", (CLOCK,))
    other = Case("live_multiple_3-0-0:1", CASE.tools, CASE.calls)
    answered = [(CASE, good), (CASE, wrong), (CASE, "Sunny!"), (CASE, "<tool_call>"), (other, good)]
    found = shares([*answered, (idle, "I cannot."), (idle, written(("clock", {}))), (idle, "<tool_call>\n{")])
    assert found == {
        "simple_cases": 4,
        "valid_call_share": 0.5,
        "correct_call_share": 0.25,
        "other_cases": 1,
        "valid_call_share_other": 1.0,
        "correct_call_share_other": 1.0,
        "irrelevant_cases": 3,
        "no_call_share": pytest.approx(1 / 3),
    }
    assert shares([])["valid_call_share"] is None
    loops = looping_share([("retail", True), ("bfcl-single", False), ("plain", False)])
    assert loops == {"looping_share_agent_prompts": 0.5, "looping_share_plain_prompts": 0.0}

"""Schema-constrained answers and tool calls are valid, all of them, many at once and under speculation."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints import DEFAULT_MODEL, resolve

pytestmark = pytest.mark.integration

AT_ONCE = 8


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORD = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
COLOUR = {"enum": ["red", "green", "blue"]}
SCHEMAS = [
    record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    record(colours={"type": "array", "items": COLOUR, "minItems": 1, "maxItems": 3}),
    record(at=record(x=DIGIT, y=DIGIT), label={"anyOf": [WORD, {"type": "null"}]}),
    record(ok={"type": "boolean"}, code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    {"$ref": "#/$defs/pair", "$defs": {"pair": record(left=COLOUR, right={"$ref": "#/$defs/digit"}), "digit": DIGIT}},
]
TOOLS = {
    "set_colour": record(colour=COLOUR),
    "move": record(dx={"type": "integer", "minimum": -9, "maximum": 9}, dy=DIGIT),
    "note": record(text=WORD),
}
TOOL_DEFINITIONS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]
QUESTIONS = [
    "Describe a person.",
    "Which colours has the flag?",
    "Go to the tree and take a note.",
    "Is it done? Code?",
]
SEVERAL = "Move to 1, 2, then to 3, 4, and note both."


@cache
def never_a_call() -> dict[str, int]:
    """The bias against the token that calls begin with."""
    (token,) = Tokenizer.from_folder(resolve(DEFAULT_MODEL)).encode_ordinary("<")
    return {str(token): -100}


def case(number: int) -> dict[str, Any]:
    """One of 200 different requests: five kinds of constraint, greedy or sampled, with some parameter more."""
    fields: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "max_tokens": 200,
        "temperature": 0 if number % 3 == 0 else 0.9,
        "seed": number,
    }
    if number % 7 == 0:
        fields |= {"presence_penalty": 0.4, "frequency_penalty": 0.2}
    schema = SCHEMAS[number % len(SCHEMAS)]
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    match number // 2 % 5:
        case 0 | 1:
            return fields | {"response_format": response_format}
        case 2:
            many = number % 4 == 0
            fields |= {"messages": [{"role": "user", "content": SEVERAL}]} if many else {}
            return fields | {"tools": TOOL_DEFINITIONS, "tool_choice": "required", "parallel_tool_calls": many}
        case 3:
            name = list(TOOLS)[number % len(TOOLS)]
            named = {"type": "function", "function": {"name": name}}
            return fields | {"tools": TOOL_DEFINITIONS, "tool_choice": named}
        case _:
            fields |= {"logit_bias": never_a_call()} if number % 2 else {}
            return fields | {
                "tools": TOOL_DEFINITIONS,
                "parallel_tool_calls": False,
                "response_format": response_format,
            }


async def answer(client: AsyncOpenAI, fields: dict[str, Any], *, stream: bool, speculation: bool) -> ChatCompletion:
    extra = {"redraft": {"speculation": speculation, "return_statistics": True}}
    if not stream:
        completion: ChatCompletion = await client.chat.completions.create(**fields, extra_body=extra)
        return completion
    state: Any = ChatCompletionStreamState()
    options = {"include_usage": True}
    async for chunk in await client.chat.completions.create(
        **fields, extra_body=extra, stream=True, stream_options=options
    ):
        state.handle_chunk(chunk)
        last = chunk
    snapshot: ChatCompletion = state.current_completion_snapshot
    snapshot.redraft = last.redraft  # type: ignore[attr-defined]
    return snapshot


async def answers(url: str, numbers: Sequence[int], *, speculation: bool, stream: Any) -> list[ChatCompletion]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:

        async def one(number: int) -> ChatCompletion:
            async with gate:
                return await answer(client, case(number), stream=stream(number), speculation=speculation)

        return await asyncio.gather(*map(one, numbers))


def check(number: int, completion: ChatCompletion) -> str:
    """Hold an answer against what was asked for; returns its kind."""
    fields, choice = case(number), completion.choices[0]
    calls = list(choice.message.tool_calls or ())
    if not calls:
        assert choice.finish_reason == "stop"
        schema = fields["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
        return "json"
    assert choice.message.content is None
    many = fields.get("parallel_tool_calls", False)
    if choice.finish_reason == "length" and many:
        calls.pop()  # a small model does not always stop calling; what it began last is cut off
    else:
        assert choice.finish_reason == "tool_calls"
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[call.function.name])
    assert many or len(calls) == 1
    if isinstance(fields.get("tool_choice"), dict):
        assert calls[0].function.name == fields["tool_choice"]["function"]["name"]
    return "calls" if len(calls) > 1 else "call"


def essence(completion: ChatCompletion) -> Any:
    choice = completion.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
    assert completion.usage is not None
    return choice.message.content, calls, choice.finish_reason, completion.usage.completion_tokens


def test_two_hundred_constrained_answers_are_valid_eight_at_once(deployment: str) -> None:
    """Grammar and speculation must not lose step, nor take the engine down (vllm 51660)."""
    numbers = range(200)
    completions = asyncio.run(answers(deployment, numbers, speculation=True, stream=lambda number: number % 2))
    kinds = Counter(check(number, completion) for number, completion in zip(numbers, completions, strict=True))
    assert kinds["json"] >= 100
    assert kinds["call"] >= 80
    assert kinds["calls"] >= 3
    accepted = sum(completion.redraft["accepted_tokens"] for completion in completions)  # type: ignore[attr-defined]
    assert accepted > 0, "drafts took part"

    sample = numbers[::8]
    plain = asyncio.run(answers(deployment, sample, speculation=False, stream=lambda number: not number % 2))
    assert [essence(completion) for completion in plain] == [essence(completions[number]) for number in sample]
    assert all(completion.redraft["verified_tokens"] == 0 for completion in plain)  # type: ignore[attr-defined]

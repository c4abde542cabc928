"""Whatever a client sends, it gets an answer in OpenAI's shape that names what is wrong; nothing reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "Hi"}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def assert_refused(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None, word: str = ""
) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert word in error["message"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_type"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [USER, {**USER, "colour": 1}]}, "messages[1].colour", "unknown_parameter"),
        ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "unsupported_value"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "invalid_value"),
        ({"messages": [{**USER, "name": "Ann"}]}, "messages", "invalid_value"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "invalid_value"),
        ({"messages": [USER, {"role": "tool", "content": "4", "tool_call_id": "a"}]}, "messages", "invalid_value"),
        ({"messages": [{**USER, "tool_calls": [{"id": "a", **function(arguments="{}")}]}]},
         "messages[0].tool_calls", "invalid_value"),
        ({"model": None}, "model", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": -0.1}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": -5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"seed": "x"}, "seed", "invalid_type"),
        ({"seed": 2**70}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_type"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"stop_token_ids": [258]}, "stop_token_ids", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_value"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [function(), function()]}, "tools", "invalid_value"),
        ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "invalid_value"),
        ({"tool_choice": function()}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [function()]},
         "tool_choice", "invalid_value"),
        ({"tool_choice": "perhaps"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "invalid_value"),
        ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(id_): 1 for id_ in range(1025)}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"response_format": "json"}, "response_format", "invalid_type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning": "b"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}]},
         "messages[0].reasoning", "invalid_value"),
        ({"user": 5}, "user", "invalid_type"),
        ({"redraft": {"speculate": False}}, "redraft.speculate", "unknown_parameter"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(gateway: Any, fields: dict[str, Any], param: str, code: str) -> None:
    assert_refused(gateway.post(**fields), 400, param, code)
    assert gateway.engine.requests == []


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b'"hi"', "object"),
        (b"\xff\xfe{", "not UTF-8 (at byte 0)"),
        (b'{"model":"\xff"}', "not UTF-8 (at byte 10)"),
        (b'{"model":"\\ud800"}', "come in pairs"),
        (b'{"temperature":NaN}', "JSON has no NaN"),
        (b'{"temperature":-Infinity}', "JSON has no Infinity"),
        (b'{"user":"a"} {"user":"b"}', "not JSON"),
        (b'{"messages":' + nested(100_000) + b"}", "nested too deeply"),
        (b'{"metadata":' + nested(100_000) + b"}", "nested too deeply"),
        (b'{"nonsense":' + nested(100_000) + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(gateway: Any, body: bytes, word: str) -> None:
    assert_refused(gateway.http.post("/v1/chat/completions", content=body), 400, word=word)


def test_a_number_out_of_range_is_refused(gateway: Any) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":1e999}'
    assert_refused(gateway.http.post("/v1/chat/completions", content=body), 400, "temperature", "invalid_value")


@pytest.mark.parametrize("depth", [200, 600, 900, 960, 990, 1200, 5000])
def test_a_tool_schema_of_any_depth_is_served_or_refused(gateway: Any, depth: int) -> None:
    body = json.dumps(gateway.body(tools=[function(parameters={"x": "@"})])).encode().replace(b'"@"', nested(depth))
    response = gateway.http.post("/v1/chat/completions", content=body)
    if response.status_code != 200:
        assert_refused(response, 400, response.json()["error"]["param"], word="nested too deeply")


def test_an_unknown_model_is_not_found(gateway: Any) -> None:
    assert_refused(gateway.post(model="gpt-9"), 404, "model", "model_not_found", "'tiny'")
    assert_refused(gateway.http.get("/v1/models/org/gpt-9"), 404, "model", "model_not_found", "'tiny'")
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.openai.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


def test_a_prompt_over_the_context_window_is_refused_with_both_numbers(gateway: Any) -> None:
    response = gateway.post(messages=[{"role": "user", "content": "x" * 5000}])
    assert_refused(response, 400, "messages", "context_length_exceeded", "4096")
    prompt_tokens = gateway.post().json()["usage"]["prompt_tokens"]
    assert f"{prompt_tokens - 2 + 5000} tokens" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(gateway: Any) -> None:
    assert_refused(gateway.http.get("/v1/nothing"), 404, word="/v1/nothing")
    assert_refused(gateway.http.get("/v1/nothing", headers={"host": "["}), 404)
    assert_refused(gateway.http.get("/v1/chat/completions/"), 404)
    response = gateway.http.get("/v1/chat/completions")
    assert_refused(response, 405, word="GET")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("header", ["x-redraft-agent", "x-redraft-session"])
@pytest.mark.parametrize("value", ["", "a b", "x" * 65, "a/b", "é".encode()])
def test_a_bad_header_is_named(gateway: Any, header: str, value: str | bytes) -> None:
    response = gateway.http.post("/v1/chat/completions", json=gateway.body(), headers={header: value})
    assert_refused(response, 400, header)


def test_a_compressed_body_is_refused(gateway: Any) -> None:
    headers = {"content-encoding": "gzip"}
    assert_refused(gateway.http.post("/v1/chat/completions", content=b"x", headers=headers), 415)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(gateway: Any, chunked: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 10_000

    content = chunks() if chunked else b"x" * 2_000_000
    response = gateway.http.post("/v1/chat/completions", content=content)
    assert_refused(response, 413, code="request_too_large", word="1048576")
    assert gateway.post().status_code == 200


def test_a_body_over_the_limit_is_refused_before_all_of_it_was_sent(gateway: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        gateway.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 10_000_000}])
    assert caught.value.status_code == 413

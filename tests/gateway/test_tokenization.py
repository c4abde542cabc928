"""What a client counts is what a completion would be given, and it comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.unit


def tokenize(gateway: Any, **fields: Any) -> Any:
    return gateway.http.post("/v1/tokenize", json=fields)


def test_a_texts_tokens_are_those_of_its_completion(gateway: Any) -> None:
    tokens = tokenize(gateway, model="tiny", prompt="naïve <|im_end|>").json()
    gateway.post_text(prompt="naïve <|im_end|>")
    assert tuple(tokens["tokens"]) == gateway.engine.requests[-1].prompt_ids
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 4096
    assert tokens["token_strs"] is None


def test_a_conversations_tokens_are_those_of_its_completion(gateway: Any) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi<|im_end|>"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({"messages": messages}, {"messages": messages, "tools": tools}):
        tokens = tokenize(gateway, **fields).json()["tokens"]
        response = gateway.post(**fields)
        assert tuple(tokens) == gateway.engine.requests[-1].prompt_ids
        assert response.json()["usage"]["prompt_tokens"] == len(tokens)
    opened = tokenize(gateway, messages=messages).json()["tokens"]
    closed = tokenize(gateway, messages=messages, add_generation_prompt=False).json()["tokens"]
    assert opened[: len(closed)] == closed
    assert len(opened) > len(closed)


def test_tokens_are_told_as_strings_when_asked(gateway: Any) -> None:
    assert tokenize(gateway, prompt="aé<|im_end|>", return_token_strs=True).json()["token_strs"] == [
        "a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"
    ]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(text=st.text(max_size=30) | st.sampled_from(["<|im_start|>user\nHi<|im_end|>\n", "\ufeff", " a  b "]))
def test_a_text_comes_back_as_it_was(gateway: Any, text: str) -> None:
    tokens = tokenize(gateway, prompt=text).json()["tokens"]
    assert gateway.http.post("/v1/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("route", "fields", "param", "status"),
    [
        ("tokenize", {}, "prompt", 400),
        ("tokenize", {"prompt": "a", "messages": []}, "prompt", 400),
        ("tokenize", {"prompt": 5}, "prompt", 400),
        ("tokenize", {"prompt": "a", "tools": []}, "tools", 400),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", 400),
        ("tokenize", {"messages": []}, "messages", 400),
        ("tokenize", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", 400),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
         "add_special_tokens", 400),
        ("tokenize", {"prompt": "a", "nonsense": 1}, "nonsense", 400),
        ("tokenize", {"prompt": "a", "model": "gpt-9"}, "model", 404),
        ("detokenize", {}, "tokens", 400),
        ("detokenize", {"tokens": "a"}, "tokens", 400),
        ("detokenize", {"tokens": [-1]}, "tokens[0]", 400),
        ("detokenize", {"tokens": [258]}, "tokens", 400),
        ("detokenize", {"tokens": [10**30]}, "tokens", 400),
        ("detokenize", {"tokens": [1], "model": "gpt-9"}, "model", 404),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(gateway: Any, route: str, fields: dict[str, Any], param: str, status: int) -> None:
    response = gateway.http.post(f"/v1/{route}", json=fields)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param

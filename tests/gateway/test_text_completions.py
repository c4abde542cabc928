"""Text completions: the prompt as it was sent, each choice its own, through the same machinery as chat."""

from __future__ import annotations

from typing import Any

import pytest

from redraft.engine.protocol import EngineUnavailable
from redraft.engine.types import GenerationRequest
from redraft.gateway.completion import PROMPTS_AT_ONCE

pytestmark = pytest.mark.unit


def test_an_answer_has_everything_an_openai_client_expects(gateway: Any) -> None:
    whole = gateway.openai.completions.create(**gateway.text_body())
    assert whole.id.startswith("cmpl-")
    assert (whole.object, whole.model, whole.system_fingerprint) == ("text_completion", "tiny", "fp_0123456789ab")
    assert [(choice.text, choice.index, choice.finish_reason) for choice in whole.choices] == [
        ("Hello there.", 0, "stop")
    ]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (2, 13, 15)
    (request,) = gateway.engine.requests
    assert request.prompt_ids == gateway.engine.ids("Hi")
    assert request.stopping.max_tokens == 16


def test_a_stream_says_the_same(gateway: Any) -> None:
    create = gateway.openai.completions.create
    *chunks, last = create(**gateway.text_body(), stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there."
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], 13)
    assert all("usage" not in chunk.model_fields_set for chunk in create(**gateway.text_body(), stream=True))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi"], ["Hi"]),
        (["Hi", "you"], ["Hi", "you"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ("a<|im_end|>b", [(*b"\x40", 257, *b"\x41")]),
    ],
)
def test_a_prompt_is_what_was_sent(gateway: Any, prompt: Any, prompts: list[Any]) -> None:
    assert gateway.post_text(prompt=prompt).status_code == 200
    expected = [gateway.engine.ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    assert [request.prompt_ids for request in gateway.engine.requests] == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_choices_of_several_prompts_follow_one_another(gateway: Any, stream: bool) -> None:
    engine = gateway.engine

    def script(request: GenerationRequest) -> Any:
        text = engine.tokenizer.decode(request.prompt_ids)
        return [commit for i in range(2) for commit in engine.answer(f" {text}{i}", choice=i, cached_tokens=1)]

    engine.script = script
    fields = gateway.text_body(prompt=["a", "b"], n=2, echo=True)
    texts: list[str] = [""] * 4
    if stream:
        *chunks, last = gateway.openai.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        usage = last.usage
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        whole = gateway.openai.completions.create(**fields)
        usage = whole.usage
        texts = [choice.text for choice in whole.choices]
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert texts == ["a a0", "a a1", "b b0", "b b1"]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (2, 16, 2)
    first, second = engine.requests[-2:]
    assert first.request_id != second.request_id
    assert first.sampling.seed is not None
    assert first.sampling == second.sampling, "prompts without a seed share a drawn one, which statistics tell"


def test_many_prompts_take_few_places_in_the_engine(gateway: Any) -> None:
    engine = gateway.engine
    most = 0

    def script(request: GenerationRequest) -> Any:
        nonlocal most
        for commit in engine.answer("a", "b"):
            most = max(most, engine.running)
            yield commit

    engine.script = script
    choices = gateway.post_text(prompt=[[number] for number in range(100)]).json()["choices"]
    assert [choice["text"] for choice in choices] == ["ab"] * 100
    assert [request.prompt_ids for request in engine.requests] == [(number,) for number in range(100)]
    assert 1 < most <= PROMPTS_AT_ONCE


def test_an_echoed_prompt_of_token_ids_is_told_with_its_control_tokens(gateway: Any) -> None:
    prompt = [256, *gateway.engine.ids("Hi")]
    assert gateway.post_text(prompt=prompt, echo=True).json()["choices"][0]["text"] == "<|im_start|>HiHello there."


def test_a_fault_of_one_prompt_ends_the_request_and_lets_the_others_go(gateway: Any, hang: object) -> None:
    engine = gateway.engine

    def script(request: GenerationRequest) -> Any:
        if request.prompt_ids == engine.ids("bad"):
            yield engine.commit(engine.ids("x"))
            yield EngineUnavailable("the engine died")
        yield hang

    engine.script = script
    response = gateway.post_text(prompt=["good", "bad", "good too"])
    assert response.status_code == 503
    assert gateway.metric("redraft_requests_in_flight") == 0


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", 5]}, "prompt", "invalid_value"),
        ({"prompt": [[5], 5]}, "prompt", "invalid_value"),
        ({"prompt": [258]}, "prompt", "invalid_value"),
        ({"prompt": [[-1]]}, "prompt[0][0]", "invalid_value"),
        ({"prompt": [True]}, "prompt[0]", "invalid_type"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "invalid_value"),
        ({"prompt": "x" * 5000}, "prompt", "context_length_exceeded"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"echo": True, "logprobs": 0}, "echo", "unsupported_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"model": "gpt-9"}, "model", "model_not_found"),
        ({"messages": []}, "messages", "unknown_parameter"),
    ],
)
def test_a_bad_field_is_named(gateway: Any, fields: dict[str, Any], param: str, code: str) -> None:
    response = gateway.post_text(**fields)
    assert response.status_code == (404 if code == "model_not_found" else 400)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert gateway.engine.requests == []


def test_a_tool_call_in_a_text_is_text(gateway: Any) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    gateway.engine.script = lambda request: gateway.engine.answer(call)
    choice = gateway.post_text().json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (call, "stop")


def test_statistics_and_the_session_are_returned(gateway: Any, step: Any) -> None:
    engine = gateway.engine
    block = engine.ids("ab")
    engine.script = lambda request: [engine.commit(block, verify_step=step(block)), *engine.answer()]
    body = gateway.text_body(redraft={"return_statistics": True}, seed=5)
    response = gateway.http.post("/v1/completions", json=body, headers={"x-redraft-session": "s1"})
    assert response.headers["x-redraft-session"] == "s1"
    statistics = response.json()["redraft"]
    assert (statistics["session_id"], statistics["seed"], statistics["verified_tokens"]) == ("s1", 5, 1)

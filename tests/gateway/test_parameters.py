"""No parameter is ignored: each is honoured, inert by nature, or refused by its name."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from redraft.engine.types import SamplingParams, StopConditions
from redraft.gateway.parameters import CHAT_PARAMETERS, TEXT_PARAMETERS

pytestmark = pytest.mark.unit

REFUSED_VALUES: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "a", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning_effort": "high",
    "service_tier": "flex",
    "store": True,
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "echo": True,
    "guided_json": "{}",
}

TEXT_REFUSED_VALUES: dict[str, Any] = {
    "suffix": "x",
    "best_of": 2,
    "response_format": {"type": "json_object"},
    "prompt_logprobs": 1,
    "guided_json": "{}",
}

ENGINE_VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "seed": 1,
    "stop": "x",
    "stop_token_ids": [5],
    "ignore_eos": True,
    "n": 2,
}

ABLE_VALUES: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize(
    ("params", "table"), [(chat_params, CHAT_PARAMETERS), (text_params, TEXT_PARAMETERS)], ids=["chat", "text"]
)
def test_every_parameter_of_the_openai_client_is_in_the_table(params: Any, table: Any) -> None:
    assert set(params.CompletionCreateParamsBase.__annotations__) | {"stream"} <= set(table)


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_what_is_not_honoured_is_refused_by_name(gateway: Any, name: str) -> None:
    assert_unsupported(gateway.post(**{name: REFUSED_VALUES[name]}), name)


@pytest.mark.parametrize("name", TEXT_REFUSED_VALUES)
def test_what_text_completions_do_not_honour_is_refused_by_name(gateway: Any, name: str) -> None:
    assert_unsupported(gateway.post_text(**{name: TEXT_REFUSED_VALUES[name]}), name)


def assert_unsupported(response: Any, name: str) -> None:
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert response.json()["error"]["code"] == "unsupported_parameter"
    assert name in response.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_accepted(serve: Any) -> None:
    gateway = serve(parameters=frozenset())
    gateway.engine.able = False
    for post, parameters in ((gateway.post, CHAT_PARAMETERS), (gateway.post_text, TEXT_PARAMETERS)):
        for name, parameter in parameters.items():
            for value in (None, *parameter.neutral):
                if name not in ("model", "messages", "prompt"):
                    assert post(**{name: value}).status_code == 200, (name, value)


def test_what_the_engine_cannot_do_is_refused_by_name(serve: Any) -> None:
    gateway = serve(parameters=frozenset())
    gateway.engine.able = False
    for name, value in (ENGINE_VALUES | ABLE_VALUES).items():
        assert_unsupported(gateway.post(**{name: value}), name)
    for name, value in (ENGINE_VALUES | {"logprobs": 0}).items():
        assert_unsupported(gateway.post_text(**{name: value}), name)
    optional = {name for name, p in CHAT_PARAMETERS.items() if p.handling in ("engine", "constrained", "logprobs")}
    assert optional == ENGINE_VALUES.keys() | ABLE_VALUES.keys()


def test_a_neutral_one_is_not_a_neutral_true(gateway: Any) -> None:
    assert gateway.post(store=0).status_code == 400


def test_an_unknown_parameter_names_the_nearest_known_one(gateway: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean max_tokens") as caught:
        gateway.openai.chat.completions.create(**gateway.body(), extra_body={"max_tokns": 5})
    assert caught.value.param == "max_tokns"
    assert caught.value.code == "unknown_parameter"


def test_every_honoured_parameter_reaches_the_engine(gateway: Any) -> None:
    gateway.engine.script = lambda request: [c for i in range(2) for c in gateway.engine.answer("x", choice=i)]
    for post, logprobs in ((gateway.post, {"logprobs": True, "top_logprobs": 3}), (gateway.post_text, {"logprobs": 3})):
        sent = post(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, presence_penalty=0.1, frequency_penalty=-0.2,
            repetition_penalty=1.3, logit_bias={"7": -100, "8": 1.5}, seed=-3, stop=["a", "b"], stop_token_ids=[5],
            ignore_eos=True, n=2, max_tokens=9, redraft={"speculation": False}, **logprobs,
        )  # fmt: skip
        assert sent.status_code == 200
        request = gateway.engine.requests[-1]
        assert request.sampling == SamplingParams(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, presence_penalty=0.1, frequency_penalty=-0.2,
            repetition_penalty=1.3, logit_bias=((7, -100.0), (8, 1.5)), seed=-3,
        )  # fmt: skip
        assert request.stopping == StopConditions(max_tokens=9, strings=("a", "b"), token_ids=(5,), ignore_eos=True)
        assert (request.n, request.logprobs, request.speculation) == (2, 3, False)


def test_defaults_are_openais(gateway: Any) -> None:
    gateway.post()
    (request,) = gateway.engine.requests
    assert request.sampling == SamplingParams(temperature=1.0)
    assert request.stopping == StopConditions(max_tokens=4096 - len(request.prompt_ids))
    assert (request.n, request.speculation, request.agent_type) == (1, True, "default")
    assert (request.logprobs, request.constraint) == (None, None)
    assert request.principal.tenant == "default"


def test_an_answer_is_never_longer_than_the_engines_cache_leaves_room_for(serve: Any) -> None:
    gateway = serve()
    gateway.engine.max_prompt_tokens = 999
    assert gateway.post().status_code == 200
    (request,) = gateway.engine.requests
    assert request.stopping.max_tokens + len(request.prompt_ids) == 1000


def test_an_answer_is_never_longer_than_the_context_leaves_room_for(gateway: Any) -> None:
    for fields in ({"max_tokens": 10**30}, {"max_completion_tokens": 5000}):
        assert gateway.post(**fields).status_code == 200
        request = gateway.engine.requests[-1]
        assert request.stopping.max_tokens + len(request.prompt_ids) == 4096

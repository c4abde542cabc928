"""The OpenAPI document describes the gateway, and the gateway lives up to it whatever is sent."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import httpx
import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def document(gateway: Any) -> dict[str, Any]:
    found: dict[str, Any] = gateway.http.get("/openapi.json").json()
    return found


def schema_of(gateway: Any, name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": document(gateway)["components"]}


@pytest.mark.unit
def test_every_route_is_described_with_what_it_reads_and_answers(gateway: Any) -> None:
    paths = document(gateway)["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == {
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/tokenize"),
        ("post", "/v1/detokenize"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("get", "/health"),
        ("get", "/ready"),
        ("get", "/metrics"),
    }
    for methods in paths.values():
        for operation in methods.values():
            assert operation["summary"]
            assert operation["responses"]["200"]["content"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]
    stream = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    done, chunk = stream["schema"]["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    assert chunk["contentSchema"]["$ref"].endswith("/ChatCompletionChunk")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({}, True),
        ({"temperature": 2, "stop": ["a"], "logit_bias": {"5": 1}, "store": False, "prompt_cache_options": {}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}},
          "tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"temperature": 2.1}, False),
        ({"store": True}, False),
        ({"max_tokns": 5}, False),
        ({"response_format": {"type": "xml"}}, False),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, False),
    ],
)  # fmt: skip
def test_the_described_request_is_the_request_that_is_taken(gateway: Any, fields: Any, valid: bool) -> None:
    body = gateway.body(**fields)
    validator = jsonschema.Draft202012Validator(schema_of(gateway, "ChatCompletionRequest"))
    assert validator.is_valid(body) == valid
    assert gateway.post(**fields).is_success == valid


def acceptable(body: dict[str, Any], *, messages: bool) -> dict[str, Any]:
    """The body with a known model, integers written as clients do, and perhaps a conversation that makes sense."""
    body = whole(body)
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    if messages and isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": "Hi"}]
    return body


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def fuzz(gateway: Any, cases: int) -> None:
    """Send ``cases`` requests, half of them as described and half not; none may be answered with a 5xx."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{gateway.port}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    reading = [operation for operation in operations if operation.method == "post"]
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        session.trust_env = False
        for operation, mode in itertools.product(reading, MODES):

            @settings(
                max_examples=-(-cases // (len(reading) * len(MODES))),
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                if isinstance(case.body, dict):
                    case.body = acceptable(case.body, messages=statuses.total() % 2 == 0)
                response = case.call(session=session, timeout=30)
                statuses[response.status_code] += 1
                assert response.status_code < 500, (response.status_code, response.text)
                case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])

            check()
        for operation in operations:
            if operation.method == "get":
                assert session.get(f"http://127.0.0.1:{gateway.port}{operation.path}").status_code < 500
    assert statuses.total() >= cases
    assert statuses[200] > cases / 10
    assert statuses[400] > cases / 10
    assert gateway.metric("redraft_requests_in_flight") == 0


@pytest.mark.integration
def test_two_thousand_requests_of_any_shape_never_fail_in_the_server(serve: Any) -> None:
    fuzz(serve(), 2_000)


@pytest.mark.nightly
def test_twenty_thousand_requests_of_any_shape_never_fail_in_the_server(serve: Any) -> None:
    fuzz(serve(), 20_000)


@pytest.mark.unit
def test_a_path_of_any_text_never_fails_in_the_server(gateway: Any) -> None:
    for name in ("%00", "%ff", "..%2f..", "a b", "{model}", "é" * 500):
        assert httpx.get(f"http://127.0.0.1:{gateway.port}/v1/models/{name}", trust_env=False).status_code < 500

"""When the engine fails, the client is told so in a way its library understands, before the first byte and after."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from redraft.engine.protocol import EngineError, EngineOverloaded, EngineUnavailable, RequestRefused
from redraft.engine.types import Health

pytestmark = pytest.mark.unit


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "status", "kind", "code"),
    [
        (RequestRefused("too many choices", "n"), 400, "invalid_request_error", "invalid_value"),
        (EngineOverloaded("the queue is full"), 429, "rate_limit_error", "engine_overloaded"),
        (EngineUnavailable("the engine is loading"), 503, "server_error", "engine_unavailable"),
        (ZeroDivisionError("secret"), 500, "server_error", "internal_error"),
    ],
)
@pytest.mark.parametrize("post", ["post", "post_text"])
def test_a_fault_before_the_first_token_is_an_http_error(
    gateway: Any, post: str, fault: Exception, status: int, kind: str, code: str, stream: bool
) -> None:
    gateway.engine.script = lambda request: [fault]
    response = getattr(gateway, post)(stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert response.headers["content-type"] == "application/json"
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status == 500:
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in error["message"]
    else:
        assert error["message"] == str(fault)
    assert error["param"] == ("n" if status == 400 else None)


@pytest.mark.parametrize("fault", [EngineUnavailable("the engine died"), ZeroDivisionError("secret")])
def test_a_fault_in_mid_stream_is_an_event_and_the_stream_is_not_done(gateway: Any, fault: Exception) -> None:
    engine = gateway.engine
    engine.script = lambda request: [engine.commit(engine.ids("Hel")), fault]
    response = gateway.post(stream=True)
    _, first, last = events(response)
    assert response.status_code == 200
    assert first["choices"][0]["delta"]["content"] == "Hel"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    for create, body in (
        (gateway.openai.chat.completions.create, gateway.body()),
        (gateway.openai.completions.create, gateway.text_body()),
    ):
        with pytest.raises(openai.APIError, match=last["error"]["message"].split(";")[0]):
            list(create(**body, stream=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("finish", [None, "abort"])
@pytest.mark.parametrize("post", ["post", "post_text"])
def test_an_answer_that_the_engine_cuts_short_is_an_error(
    gateway: Any, post: str, stream: bool, finish: str | None
) -> None:
    engine = gateway.engine
    engine.script = lambda request: [engine.commit(engine.ids("Hel")), engine.commit((), finish_reason=finish)]
    response = getattr(gateway, post)(stream=stream)
    error = events(response)[-1]["error"] if stream else response.json()["error"]
    assert error["code"] == "engine_unavailable"
    assert stream or response.status_code == 503


def test_the_openai_client_sees_its_own_exceptions(gateway: Any) -> None:
    for fault, expected in (
        (EngineOverloaded("full"), openai.RateLimitError),
        (EngineUnavailable("gone"), openai.InternalServerError),
        (RequestRefused("no"), openai.BadRequestError),
    ):
        gateway.engine.script = lambda request, fault=fault: [fault]
        with pytest.raises(expected):
            gateway.openai.chat.completions.create(**gateway.body())


@pytest.mark.parametrize("fault", [EngineUnavailable("the engine is loading"), EngineError("no idea")])
def test_ready_says_in_words_why_it_is_not_and_health_stays_well(gateway: Any, fault: Exception) -> None:
    gateway.engine.fault = fault
    response = gateway.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == str(fault)
    assert gateway.http.get("/health").status_code == 200
    assert "redraft_engine_ready 0.0" in gateway.http.get("/metrics").text
    gateway.engine.fault = None
    assert gateway.http.get("/ready").status_code == 200


def test_an_engine_that_is_up_but_not_ready_is_reported_in_its_words(gateway: Any) -> None:
    gateway.engine.state = Health(ready=False, detail="self-test running")
    assert gateway.http.get("/ready").json()["error"]["message"] == "self-test running"


def test_an_engine_that_serves_otherwise_than_it_should_is_ready_and_health_says_so(gateway: Any) -> None:
    assert gateway.http.get("/health").json() == {"status": "ok"}
    gateway.engine.state = Health(ready=True, detail="version a should serve, but cannot. Serving instead: b")
    for path, status in (("/health", "ok"), ("/ready", "ready")):
        response = gateway.http.get(path)
        assert response.status_code == 200
        assert response.json() == {"status": status, "detail": gateway.engine.state.detail}


def test_an_engine_that_is_away_at_first_is_asked_again(serve: Any) -> None:
    gateway = serve()
    gateway.engine.fault = EngineUnavailable("the engine is loading")
    for response in (gateway.post(), gateway.http.get("/v1/models"), gateway.post(stream=True)):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    gateway.engine.fault = None
    assert gateway.post().status_code == 200


def test_an_engine_that_does_not_answer_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.gateway.service.ENGINE_SECONDS", 0.05)
    monkeypatch.setattr("redraft.gateway.service.ALIVE_SECONDS", 0.05)
    gateway = serve()
    gateway.engine.mute = True
    assert gateway.http.get("/ready").status_code == 503
    assert gateway.http.get("/health").json()["detail"] == "The engine did not answer within 0.05 seconds."
    assert gateway.post().status_code == 503
    assert "redraft_engine_ready 0.0" in gateway.http.get("/metrics").text

"""What ``/metrics`` says about the requests that were served."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.unit


def test_served_requests_are_counted_by_route_and_status(serve: Any) -> None:
    gateway = serve()
    gateway.post()
    gateway.post(stream=True)
    gateway.post(messages=[])
    gateway.http.get("/v1/models/some/other")
    gateway.http.get("/no/such/path")
    text = gateway.http.get("/metrics").text
    for line in (
        'redraft_requests_total{route="/v1/chat/completions",status="200"} 2.0',
        'redraft_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'redraft_requests_total{route="/v1/models/{model:path}",status="404"} 1.0',
        'redraft_requests_total{route="unmatched",status="404"} 1.0',
        "redraft_requests_in_flight 0.0",
        "redraft_engine_kv_used_bytes 3.0",
    ):
        assert line in text


def test_tokens_and_verify_steps_are_counted(serve: Any, step: Any) -> None:
    gateway = serve()
    engine = gateway.engine
    block = engine.ids("abc")
    engine.script = lambda request: [
        engine.commit(engine.ids("x"), cached_tokens=5),
        engine.commit(block, verify_step=step(block)),
        *engine.answer(),
    ]
    response = gateway.http.post("/v1/chat/completions", json=gateway.body(), headers={"x-redraft-agent": "coder"})
    usage = response.json()["usage"]
    text = gateway.http.get("/metrics").text
    drafter = 'agent_type="coder",context_bucket="512",drafter_kind="ngram",drafter_version="builtin"'
    for line in (
        f"redraft_committed_tokens_total{{{drafter}}} 3.0",
        f"redraft_verify_steps_total{{{drafter}}} 1.0",
        f"redraft_drafted_tokens_total{{{drafter}}} 2.0",
        f'redraft_prompt_tokens_total{{agent_type="coder"}} {float(usage["prompt_tokens"])}',
        'redraft_cached_prompt_tokens_total{agent_type="coder"} 5.0',
        'redraft_completion_tokens_total{agent_type="coder"} 5.0',
        'redraft_time_to_first_token_seconds_count{agent_type="coder"} 1.0',
        'redraft_time_per_output_token_seconds_count{agent_type="coder"} 1.0',
        'redraft_request_seconds_count{agent_type="coder"} 1.0',
    ):
        assert line in text.replace(
            'drafter_kind="ngram",drafter_version="builtin",agent_type="coder",context_bucket="512"', drafter
        ), line


def test_a_request_the_engine_refused_counts_no_tokens(serve: Any) -> None:
    gateway = serve()
    gateway.engine.script = lambda request: [RuntimeError("no")]
    assert gateway.post().status_code == 500
    assert gateway.metric("redraft_prompt_tokens_total") == 0

"""Metrics can be divided and added up: numerators and denominators, bounded labels, nothing stale."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from redraft.engine.types import DrafterVersion, Health, VerifyStep
from redraft.feedback.metrics import MAX_AGENT_TYPES, OTHER, ServingMetrics

pytestmark = pytest.mark.unit


def verify_step(**fields: Any) -> VerifyStep:
    defaults: dict[str, Any] = {
        "request_id": "r",
        "choice": 0,
        "position": 600,
        "drafted": (1, 2, 3, 4, 5),
        "draft_prob": None,
        "match_length": 3,
        "block_length": 4,
        "accepted": 2,
        "committed": (1, 2, 9),
        "explored": False,
        "batch_size": 1,
        "total_rows": 5,
        "draft_ms": 0.1,
        "verify_ms": 1.0,
        "target_entropy": None,
        "drafter": DrafterVersion("ngram", "builtin"),
        "target": "t",
        "cached_tokens": 0,
    }
    return VerifyStep(**{**defaults, **fields})


def samples(
    metrics: ServingMetrics, health: Health | None = None
) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    text = metrics.render(health or Health(ready=False)).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_verify_step_is_counted_as_numerators_and_denominators() -> None:
    metrics = ServingMetrics()
    for _ in range(2):
        metrics.count_step(verify_step(), "coder")
    labels = (
        ("agent_type", "coder"),
        ("context_bucket", "1024"),
        ("drafter_kind", "ngram"),
        ("drafter_version", "builtin"),
    )
    found = samples(metrics)
    counted = {name: found[f"redraft_{name}_total"][labels] for name in (
        "verify_steps", "committed_tokens", "drafted_tokens", "verified_tokens", "accepted_tokens")}  # fmt: skip
    assert counted == {
        "verify_steps": 2,
        "committed_tokens": 6,
        "drafted_tokens": 10,
        "verified_tokens": 8,
        "accepted_tokens": 4,
    }


def test_a_step_without_a_drafter_counts_too() -> None:
    metrics = ServingMetrics()
    metrics.count_step(verify_step(drafter=None, drafted=(), block_length=0, accepted=0, committed=(9,)), "default")
    (labels,) = samples(metrics)["redraft_verify_steps_total"]
    assert dict(labels)["drafter_kind"] == "none"


def test_agent_types_are_bounded_and_nothing_is_lost_beyond() -> None:
    metrics = ServingMetrics()
    for i in range(MAX_AGENT_TYPES + 10):
        metrics.count_step(verify_step(), f"agent{i}")
        metrics.observe_request(f"agent{i}", 1.0)
    steps = samples(metrics)["redraft_verify_steps_total"]
    by_agent = {dict(labels)["agent_type"]: value for labels, value in steps.items()}
    assert len(by_agent) == MAX_AGENT_TYPES + 1
    assert by_agent[OTHER] == 10
    assert sum(steps.values()) == MAX_AGENT_TYPES + 10


def test_tokens_and_times_are_kept_by_agent_type() -> None:
    metrics = ServingMetrics()
    metrics.count_tokens("coder", prompt=100, cached=60, completion=7)
    metrics.observe_first_token("coder", 0.2)
    metrics.observe_token_pace("coder", 0.02)
    metrics.observe_request("coder", 3)
    found = samples(metrics)
    label = (("agent_type", "coder"),)
    assert found["redraft_prompt_tokens_total"][label] == 100
    assert found["redraft_cached_prompt_tokens_total"][label] == 60
    assert found["redraft_completion_tokens_total"][label] == 7
    assert found["redraft_time_to_first_token_seconds_sum"][label] == pytest.approx(0.2)
    assert found["redraft_time_per_output_token_seconds_sum"][label] == pytest.approx(0.02)
    assert found["redraft_request_seconds_sum"][label] == pytest.approx(3)


def test_an_engine_that_is_away_leaves_no_stale_gauges() -> None:
    metrics = ServingMetrics()
    health = Health(ready=True, running=3, waiting=1, kv_used_bytes=10, kv_budget_bytes=20)
    found = samples(metrics, health)
    assert found["redraft_engine_ready"] == {(): 1}
    assert found["redraft_engine_running_requests"] == {(): 3}
    assert found["redraft_engine_waiting_requests"] == {(): 1}
    assert found["redraft_engine_kv_used_bytes"] == {(): 10}
    assert found["redraft_engine_kv_budget_bytes"] == {(): 20}
    assert found["redraft_engine_speculation_enabled"] == {(): 1}
    found = samples(metrics)
    assert found["redraft_engine_ready"] == {(): 0}
    assert "redraft_engine_running_requests" not in found


def test_two_gateways_in_one_process_do_not_share_counts() -> None:
    first, second = ServingMetrics(), ServingMetrics()
    first.count_request("/health", 200)
    assert sum(samples(first)["redraft_requests_total"].values()) == 1
    assert "redraft_requests_total" not in samples(second)

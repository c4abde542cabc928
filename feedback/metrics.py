"""Prometheus metrics of serving: counters to divide, never ratios; seconds, bytes and tokens, nothing scaled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from redraft.engine.types import Health, VerifyStep, context_bucket

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_AGENT_TYPES = 64
OTHER = "other"

_TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.5, 1)
_E2E_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class _StepCounters:
    """The counters of one (drafter kind, version, agent type, context bucket), looked up once."""

    def __init__(self, families: Iterable[Counter], labels: tuple[str, ...]) -> None:
        self.steps, self.committed, self.drafted, self.verified, self.accepted = (f.labels(*labels) for f in families)


class _EngineCollector(Collector):
    """The engine's state as it was read for this scrape; nothing stale of one that is not ready."""

    def __init__(self) -> None:
        self.health = Health(ready=False)

    def collect(self) -> Iterable[Metric]:
        health = self.health
        yield GaugeMetricFamily("redraft_engine_ready", "1 when the engine answers and is ready.", health.ready)
        if not health.ready:
            return
        yield GaugeMetricFamily("redraft_engine_running_requests", "Choices that decode now.", health.running)
        yield GaugeMetricFamily("redraft_engine_waiting_requests", "Requests that queue.", health.waiting)
        yield GaugeMetricFamily("redraft_engine_kv_used_bytes", "K/V cache in use.", health.kv_used_bytes)
        yield GaugeMetricFamily("redraft_engine_kv_budget_bytes", "K/V cache allowed.", health.kv_budget_bytes)
        yield GaugeMetricFamily("redraft_engine_speculation_enabled", "1 when drafts are verified.", health.speculation)


class ServingMetrics:
    """Everything ``/metrics`` shows, in a registry of its own.

    Accept length is ``redraft_committed_tokens_total`` over ``redraft_verify_steps_total``; the token that prefill
    samples is in neither, only in ``redraft_completion_tokens_total``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._agent_types: set[str] = set()
        self._steps: dict[tuple[str, ...], _StepCounters] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("agent_type",), buckets=buckets, registry=self.registry)

        step = ("drafter_kind", "drafter_version", "agent_type", "context_bucket")
        self._step_families = (
            counter("redraft_verify_steps", "Verify steps.", *step),
            counter("redraft_committed_tokens", "Tokens that verify steps committed.", *step),
            counter("redraft_drafted_tokens", "Tokens that drafters proposed.", *step),
            counter("redraft_verified_tokens", "Drafted tokens that were sent to verification.", *step),
            counter("redraft_accepted_tokens", "Drafted tokens that the target agreed with.", *step),
        )
        self._requests = counter("redraft_requests", "Requests answered.", "route", "status")
        self.in_flight = Gauge("redraft_requests_in_flight", "Requests being answered.", registry=self.registry)
        self._prompt = counter("redraft_prompt_tokens", "Prompt tokens.", "agent_type")
        self._cached = counter("redraft_cached_prompt_tokens", "Prompt tokens from the prefix cache.", "agent_type")
        self._completion = counter("redraft_completion_tokens", "Tokens of answers.", "agent_type")
        self._ttft = histogram("redraft_time_to_first_token_seconds", "Request read to first token.", _TTFT_SECONDS)
        self._tpot = histogram(
            "redraft_time_per_output_token_seconds", "(t_last - t_first) / (n - 1) of a choice.", _TPOT_SECONDS
        )
        self._e2e = histogram("redraft_request_seconds", "Request read to last token.", _E2E_SECONDS)

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def count_step(self, step: VerifyStep, agent_type: str) -> None:
        """Count one verify step under the bucket of its block start."""
        drafter = step.drafter
        labels = (
            drafter.kind if drafter else "none",
            drafter.id if drafter else "none",
            self._bounded(agent_type),
            str(context_bucket(step.position)),
        )
        counters = self._steps.get(labels)
        if counters is None:
            counters = self._steps[labels] = _StepCounters(self._step_families, labels)
        counters.steps.inc()
        counters.committed.inc(len(step.committed))
        counters.drafted.inc(len(step.drafted))
        counters.verified.inc(step.block_length)
        counters.accepted.inc(step.accepted)

    def count_tokens(self, agent_type: str, *, prompt: int, cached: int, completion: int) -> None:
        agent_type = self._bounded(agent_type)
        self._prompt.labels(agent_type).inc(prompt)
        self._cached.labels(agent_type).inc(cached)
        self._completion.labels(agent_type).inc(completion)

    def observe_first_token(self, agent_type: str, seconds: float) -> None:
        self._ttft.labels(self._bounded(agent_type)).observe(seconds)

    def observe_token_pace(self, agent_type: str, seconds: float) -> None:
        self._tpot.labels(self._bounded(agent_type)).observe(seconds)

    def observe_request(self, agent_type: str, seconds: float) -> None:
        self._e2e.labels(self._bounded(agent_type)).observe(seconds)

    def render(self, health: Health) -> bytes:
        """The exposition text, with the engine's health as it was read just now."""
        self._engine.health = health
        return generate_latest(self.registry)

    def _bounded(self, agent_type: str) -> str:
        if agent_type not in self._agent_types:
            if len(self._agent_types) >= MAX_AGENT_TYPES:
                return OTHER
            self._agent_types.add(agent_type)
        return agent_type


DropCause = Literal["queue_full", "storage", "closed", "fault"]


class CaptureMetrics:
    """What became of the answers that were to be kept: each is recorded or dropped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"redraft_capture_{name}", text, labels, registry=self.registry)

        self._recorded = counter("recorded_turns", "Answers whose events were written.")
        self._dropped = counter("dropped_turns", "Answers whose events were lost.", "cause")
        self._spans = counter("spans", "Spans written.", "reason")
        self._over_quota = counter("over_quota_spans", "Spans that a quota kept out.", "reason")
        self._written = counter("written_bytes", "Bytes written to disk.", "what")
        self._removed = counter("removed", "What retention removed: segments, and turns of contexts.", "what")
        self._seconds = counter("seconds", "Time taken from serving: of the event loop, and CPU beside it.", "where")
        self.queued = Gauge("redraft_capture_queued_turns", "Answers that wait to be written.", registry=self.registry)

    def recorded(self, turns: int) -> None:
        self._recorded.inc(turns)

    def dropped(self, cause: DropCause, turns: int = 1) -> None:
        self._dropped.labels(cause).inc(turns)

    def spans(self, reason: str, count: int) -> None:
        self._spans.labels(reason).inc(count)

    def over_quota(self, reason: str, count: int) -> None:
        self._over_quota.labels(reason).inc(count)

    def wrote(self, what: Literal["events", "contexts"], size: int) -> None:
        self._written.labels(what).inc(size)

    def removed(self, what: Literal["segment", "turn"], count: int = 1) -> None:
        self._removed.labels(what).inc(count)

    def spent(self, where: Literal["event_loop", "worker"], seconds: float) -> None:
        self._seconds.labels(where).inc(seconds)

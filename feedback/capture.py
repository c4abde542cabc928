"""What is worth keeping of one answer: its event, the spans to learn from, and whether its tokens are kept.

No I/O and no clock: the same turns in the same order give the same events.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
from msgspec import Struct

from redraft.engine.types import (
    DrafterVersion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Stratum,
    VerifyStep,
    context_bucket,
    is_looping,
)
from redraft.feedback.config import FeedbackConfig
from redraft.feedback.contexts import TurnContext, context_id
from redraft.feedback.events import Event, Origin, Reason, SpanEvent, StepCounts, TurnEvent, event_id, session_hash

EARLY = 0.5
"""A rejection is early where fewer than this share of the verified tokens were accepted."""

HOUR = 3600

TokenSpans = Callable[[Sequence[int]], Sequence[tuple[int, int]]]
"""Runs [start, end) of an answer's tokens."""


class Turn(Struct, frozen=True, kw_only=True):
    """One choice as it ended; ``token_ids`` are its answer, ``seed`` the one in force, ``time`` since the epoch."""

    request: GenerationRequest
    choice: int
    target: str
    token_ids: tuple[int, ...]
    steps: tuple[VerifyStep, ...]
    finish_reason: FinishReason
    seed: int | None
    time: float


class Captured(Struct, frozen=True):
    """What is kept of a turn, its event first, and how many spans a quota kept out, by reason."""

    events: tuple[Event, ...]
    context: TurnContext | None
    over_quota: Counter[Reason]


class Capture:
    """The policy of one deployment; ``tokenizer`` and ``template`` are hashes of what rendered its prompts."""

    def __init__(self, config: FeedbackConfig, *, tokenizer: str, template: str, tool_calls: TokenSpans) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._tool_calls = tool_calls
        self._quotas = _Quotas(config.spans_per_hour, config.context_tokens_per_hour)
        self._probability: dict[Reason, float] = {
            "rejected": config.rejected_share,
            "entropy": config.entropy_share,
            "draft_prob": config.draft_prob_share,
            "tool_call": config.tool_call_share,
            "baseline": config.baseline_share,
        }

    def __call__(self, turn: Turn) -> Captured:
        request = turn.request
        tenant = request.principal.tenant
        session = session_hash(tenant, request.session_id)
        sampling = msgspec.structs.replace(request.sampling, seed=turn.seed)
        baseline = _drawn(session, self._config.baseline_share)
        context = TurnContext(
            tenant=tenant,
            session=session,
            time=turn.time,
            target=turn.target,
            token_ids=request.prompt_ids + turn.token_ids,
            prompt_tokens=len(request.prompt_ids),
            sampling=sampling,
        )
        reference = context_id(context)
        origin = Origin(
            tenant=tenant,
            agent_type=request.agent_type,
            session=session,
            request_id=request.request_id,
            choice=turn.choice,
            target=turn.target,
            tokenizer=self._tokenizer,
            template=self._template,
        )
        spans = [
            _span_event(turn, origin, sampling, reason, steps, self._probability[reason], reference)
            for reason, steps in self._worthy(turn, baseline)
        ]
        spans = [span for span in spans if span.reason == "baseline" or _drawn(span.id, span.probability)]
        quota = self._quotas.of(tenant, turn.time)
        wanted = Counter[Reason](span.reason for span in spans)
        if baseline and not spans:
            wanted["baseline"] = 1
        spans = spans[: quota.spans]
        keep = bool(spans) or baseline
        if len(context.token_ids) > quota.tokens:
            spans, keep = [], False
        quota.spans -= len(spans)
        quota.tokens -= len(context.token_ids) if keep else 0
        event = TurnEvent(
            id=event_id(request.request_id, turn.choice, len(request.prompt_ids), "turn"),
            time=turn.time,
            origin=origin,
            sampling=sampling,
            constrained=request.constraint is not None,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(turn.token_ids),
            looping=is_looping(turn.token_ids),
            baseline=baseline,
            probability=self._config.baseline_share,
            counts=tuple(step_counts(turn)),
            context=reference if keep else None,
            finish_reason=turn.finish_reason,
        )
        kept = Counter[Reason](span.reason for span in spans)
        if keep and baseline and not spans:
            kept = wanted
        return Captured((event, *spans), context if keep else None, wanted - kept)

    def _worthy(self, turn: Turn, baseline: bool) -> Iterator[tuple[Reason, list[VerifyStep]]]:
        """Runs of verify steps, each of one drafter, with the reason to keep them."""
        if turn.finish_reason == "abort":
            return
        if baseline:
            for steps in _runs(turn.steps, lambda step: True):
                yield "baseline", steps
            return
        first = len(turn.request.prompt_ids)
        calls = [(start + first, end + first) for start, end in self._tool_calls(turn.token_ids)]
        reasons: dict[Reason, Callable[[VerifyStep], bool]] = {
            "rejected": _rejected_early,
            "entropy": lambda step: max(step.target_entropy or (0.0,)) > self._config.entropy_nats,
            "draft_prob": lambda step: (
                min((step.draft_prob or ())[: compared(step)], default=1.0) < self._config.draft_prob_below
            ),
            "tool_call": lambda step: any(step.position + 1 < end and start < _end(step) for start, end in calls),
        }
        for reason, worthy in reasons.items():
            for steps in _runs(turn.steps, worthy):
                yield reason, steps


def compared(step: VerifyStep) -> int:
    """How many drafted tokens were compared with the target's: those accepted, and the one rejected, if any.

    Where the target's token did not follow the last accepted one, a stop ended the answer there.
    """
    return step.accepted + _rejected(step)


def step_counts(turn: Turn) -> list[StepCounts]:
    """Sums over a turn's verify steps, by drafter and by the bucket of a step's last committed position."""
    request = turn.request
    groups: dict[tuple[DrafterVersion, int], list[VerifyStep]] = {}
    for step in turn.steps:
        if step.drafter is not None:
            key = (step.drafter, context_bucket(step.position + len(step.committed)))
            groups.setdefault(key, []).append(step)
    counts = []
    for (drafter, bucket), steps in groups.items():
        explored = [step for step in steps if step.explored]
        positions = range(max((step.block_length for step in explored), default=0))
        counts.append(
            StepCounts(
                drafter=drafter,
                stratum=Stratum(
                    request.principal.tenant,
                    request.agent_type,
                    bucket,
                    request.sampling.mode,
                    request.constraint is not None,
                ),
                committed=sum(len(step.committed) for step in steps),
                verify_steps=len(steps),
                explored_steps=len(explored),
                reached=tuple(sum(compared(step) > position for step in explored) for position in positions),
                accepted=tuple(sum(step.accepted > position for step in explored) for position in positions),
            )
        )
    return counts


def _rejected(step: VerifyStep) -> bool:
    return step.accepted < step.block_length and step.accepted < len(step.committed)


def _rejected_early(step: VerifyStep) -> bool:
    return _rejected(step) and step.accepted < EARLY * step.block_length


def _end(step: VerifyStep) -> int:
    return step.position + 1 + len(step.committed)


def _runs(steps: Sequence[VerifyStep], worthy: Callable[[VerifyStep], bool]) -> Iterator[list[VerifyStep]]:
    for (kept, _), run in groupby(steps, lambda step: (worthy(step), step.drafter)):
        if kept:
            yield list(run)


def _span_event(
    turn: Turn,
    origin: Origin,
    sampling: SamplingParams,
    reason: Reason,
    steps: Sequence[VerifyStep],
    probability: float,
    context: str,
) -> SpanEvent:
    start = steps[0].position + 1
    without = any(step.draft_prob is None and step.drafted for step in steps)
    measured = all(step.target_entropy is not None for step in steps)
    return SpanEvent(
        id=event_id(origin.request_id, origin.choice, start, reason),
        time=turn.time,
        origin=origin,
        drafter=steps[0].drafter,
        sampling=sampling,
        constrained=turn.request.constraint is not None,
        start=start,
        end=_end(steps[-1]),
        block_length=tuple(step.block_length for step in steps),
        rows_verified=sum(step.block_length + 1 for step in steps),
        accepted=tuple(step.accepted for step in steps),
        drafted=tuple(step.drafted for step in steps),
        target_tokens=tuple(token for step in steps for token in step.committed),
        draft_prob=None if without else tuple(step.draft_prob or () for step in steps),
        entropies=tuple(value for step in steps for value in step.target_entropy or ()) if measured else None,
        censored=any(not _rejected(step) and step.accepted < len(step.drafted) for step in steps),
        reason=reason,
        probability=probability,
        context=context,
    )


def _drawn(name: str, probability: float) -> bool:
    """Whether a name is in a share of all names; the same answer every time."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"redraft-draw").digest()
    return int.from_bytes(digest) < probability * 2**64


@dataclass
class _Quota:
    """What a tenant has left of an hour."""

    spans: int
    tokens: int


class _Quotas:
    """Each tenant's of the present hour; an hour that a clock set back repeats starts anew."""

    def __init__(self, spans: int, tokens: int) -> None:
        self._allowed = (spans, tokens)
        self._hour = -1
        self._left: dict[str, _Quota] = {}

    def of(self, tenant: str, now: float) -> _Quota:
        if self._hour != (hour := int(now // HOUR)):
            self._hour = hour
            self._left.clear()
        return self._left.setdefault(tenant, _Quota(*self._allowed))

"""What is kept of an answer, and that its counts are those that a replay of it would give."""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import Any

import msgspec
import pytest

from redraft.engine.types import Constraint, DrafterVersion, Principal, SamplingParams, context_bucket
from redraft.feedback.capture import Capture, step_counts
from redraft.feedback.contexts import context_id
from redraft.feedback.events import SpanEvent, StepCounts, TurnEvent
from redraft.retrain.data.sample import Sample
from redraft.retrain.replay import walk

from .conftest import DFLASH, make_capture, make_step, make_turn, verified

pytestmark = pytest.mark.unit


def spans_of(capture: Capture, turn: Any) -> list[SpanEvent]:
    return [event for event in capture(turn).events if isinstance(event, SpanEvent)]


def turn_of(capture: Capture, turn: Any) -> TurnEvent:
    event = capture(turn).events[0]
    assert isinstance(event, TurnEvent)
    return event


def test_counts_are_those_of_the_walk_over_the_same_answer_and_drafts() -> None:
    """Stops inside a block, drafts of any length and longer than what was verified, and answers of one token."""
    rng = random.Random(3)
    ended_inside = longer = 0
    for _ in range(300):
        prompt, length = rng.randint(1, 600), rng.randint(1, 5)
        answer = [rng.randint(0, 3) for _ in range(rng.randint(1, 40))]
        drafts = {
            at: [rng.randint(0, 3) for _ in range(rng.randint(0, 7))] for at in range(prompt, prompt + len(answer))
        }
        steps = verified(prompt, answer, drafts.__getitem__, length)
        ended_inside += bool(steps) and steps[-1].accepted == len(steps[-1].committed)
        longer += any(len(step.drafted) > step.block_length for step in steps)
        tokens = (*(0 for _ in range(prompt)), *answer)
        spans = ((prompt, prompt + len(answer)),)
        sample = Sample("", "", "", "test", "", tokens, spans, greedy=True, looping=False)
        expected = walk(sample, drafts.__getitem__, length)
        counts = step_counts(make_turn(steps, prompt=tokens[:prompt]))
        assert sum(each.committed for each in counts) == expected.committed
        assert sum(each.verify_steps for each in counts) == expected.verify_steps
        for name in ("reached", "accepted"):
            pooled = [sum(column) for column in zip_longest(*(getattr(each, name) for each in counts), fillvalue=0)]
            assert pooled + [0] * (length - len(pooled)) == list(getattr(expected, name)), name
    assert ended_inside > 20
    assert longer > 100


def test_counts_are_by_drafter_and_by_the_bucket_of_the_last_committed_position() -> None:
    ngram = DrafterVersion("ngram", "builtin")
    prompt = range(510)
    steps = [
        make_step(510, [5], [6]),
        make_step(511, [5, 5], [5]),
        make_step(513, [5], [6], drafter=ngram),
        make_step(514, [5], drafter=None),
    ]
    counts = {
        (each.drafter, each.stratum.context_bucket): each for each in step_counts(make_turn(steps, prompt=prompt))
    }
    assert set(counts) == {(DFLASH, 512), (DFLASH, 1024), (ngram, 1024)}
    assert [context_bucket(position) for position in (511, 513)] == [512, 1024]
    assert (counts[DFLASH, 1024].committed, counts[DFLASH, 1024].verify_steps) == (2, 1)


def test_hazards_are_of_exploration_steps_alone_and_of_what_was_verified() -> None:
    steps = [
        make_step(4, [5], [6, 7], explored=False),
        make_step(5, [5, 6], [5, 6, 7], block_length=1, accepted=1),
        make_step(7, [5], [6, 7]),
    ]
    (counts,) = step_counts(make_turn(steps))
    assert (counts.committed, counts.verify_steps, counts.explored_steps) == (4, 3, 2)
    assert (counts.reached, counts.accepted) == ((2, 0), (1, 0))


def test_the_stratum_says_tenant_agent_mode_and_constraint() -> None:
    turn = make_turn(
        [make_step(3, [5], [6])],
        principal=Principal("acme"),
        agent_type="coder",
        sampling=SamplingParams(temperature=0.7),
        constraint=Constraint("lark", "start: /x/"),
    )
    event = turn_of(make_capture(), turn)
    (counts,) = event.counts
    stratum = counts.stratum
    assert (stratum.tenant, stratum.agent_type, stratum.mode, stratum.constrained) == ("acme", "coder", "sampled", True)
    assert event.constrained
    assert event.sampling.seed == 7, "the seed that was drawn is recorded"


def test_a_rejected_span_is_a_run_of_steps_in_which_fewer_than_half_were_accepted() -> None:
    steps = [
        make_step(3, [5, 6, 7], [5, 6, 8, 9]),
        make_step(6, [5], [6, 6]),
        make_step(7, [5, 6], [5, 7, 7, 7]),
        make_step(9, [5, 6], [5]),
        make_step(11, [5], [6]),
        make_step(12, [5]),
    ]
    first, second = spans_of(make_capture(), make_turn(steps))
    assert (first.reason, first.start, first.end) == ("rejected", 7, 10)
    assert first.target_tokens == (5, 5, 6)
    assert (first.block_length, first.accepted, first.rows_verified) == ((2, 4), (0, 1), 8)
    assert first.drafted == ((6, 6), (5, 7, 7, 7))
    assert first.draft_prob == ((0.9, 0.9), (0.9, 0.9, 0.9, 0.9))
    assert first.entropies == (0.1, 0.1, 0.1)
    assert (second.start, second.end) == (12, 13)
    turn = make_turn(steps)
    context = make_capture()(turn).context
    assert context is not None
    assert context.token_ids[first.start : first.end] == first.target_tokens


def test_unsure_targets_and_drafters_give_spans() -> None:
    unsure = make_step(3, [5, 6], [5], target_entropy=(0.0, 3.0))
    guess = make_step(5, [5, 6], [5, 7], draft_prob=(0.05, 0.9))
    never_compared = make_step(7, [5], [6, 7], draft_prob=(0.9, 0.05), accepted=0, block_length=1)
    spans = spans_of(make_capture(rejected_share=0.0), make_turn([unsure, guess, never_compared]))
    assert [(span.reason, span.start, span.end) for span in spans] == [("entropy", 4, 6), ("draft_prob", 6, 8)]


def test_steps_inside_a_tool_call_give_a_span() -> None:
    steps = [make_step(3, [5, 6], [5]), make_step(5, [7, 8], [7]), make_step(7, [9], [9])]
    capture = make_capture(tool_calls=[(3, 5)])
    (span,) = spans_of(capture, make_turn(steps))
    assert (span.reason, span.start, span.end) == ("tool_call", 6, 8), "answer tokens 3 and 4 are positions 6 and 7"


def test_a_baseline_session_gives_its_whole_answers_and_nothing_else() -> None:
    steps = [make_step(3, [5], [6]), make_step(4, [5, 6], [5])]
    captured = make_capture(baseline_share=1.0, tool_calls=[(0, 4)])(make_turn(steps))
    event, span = captured.events
    assert isinstance(event, TurnEvent)
    assert isinstance(span, SpanEvent)
    assert event.baseline
    assert (span.reason, span.start, span.end, span.probability) == ("baseline", 4, 7, 1.0)
    assert captured.context is not None
    assert event.context == span.context == context_id(captured.context)
    assert captured.context.token_ids == (1, 2, 3, 9, 5, 5, 6)


def test_an_answer_without_verify_steps_is_an_event_with_its_tokens_where_baseline() -> None:
    captured = make_capture(baseline_share=1.0)(make_turn())
    (event,) = captured.events
    assert isinstance(event, TurnEvent)
    assert (event.completion_tokens, event.counts) == (1, ())
    assert captured.context is not None
    assert make_capture()(make_turn()).context is None


def test_sessions_are_drawn_whole_uniformly_and_the_same_every_time() -> None:
    capture = make_capture(baseline_share=0.3)
    drawn = {
        name: {turn_of(capture, make_turn(session_id=name, request_id=f"{name}-{turn}")).baseline for turn in range(3)}
        for name in map(str, range(1000))
    }
    assert all(len(verdicts) == 1 for verdicts in drawn.values())
    assert 250 < sum(True in verdicts for verdicts in drawn.values()) < 350
    again = make_capture(baseline_share=0.3)
    assert all(turn_of(again, make_turn(session_id=name)).baseline == (True in drawn[name]) for name in drawn)


def test_spans_are_kept_in_the_share_that_they_state() -> None:
    capture = make_capture(rejected_share=0.25)
    kept = [
        span
        for number in range(1000)
        for span in spans_of(capture, make_turn([make_step(3, [5], [6])], request_id=str(number)))
    ]
    assert 200 < len(kept) < 300
    assert {span.probability for span in kept} == {0.25}
    assert len({span.id for span in kept}) == len(kept)


def test_the_same_turn_gives_the_same_events() -> None:
    turn = make_turn([make_step(3, [5], [6])])
    assert make_capture()(turn) == make_capture()(turn)


def test_an_answer_cut_off_counts_what_was_committed_and_has_no_spans() -> None:
    looping = [make_step(3 + at, [5], [6]) for at in range(80)]
    event = turn_of(make_capture(), make_turn(looping, finish_reason="abort"))
    assert (event.finish_reason, event.counts[0].committed) == ("abort", 80)
    assert event.looping, "a client that gives a looping answer up does not make it a good one"
    assert spans_of(make_capture(), make_turn(looping, finish_reason="abort")) == []
    assert spans_of(make_capture(), make_turn(looping)) != []


def test_spans_of_two_drafters_are_two() -> None:
    steps = [
        make_step(3, [5], [6]),
        make_step(4, [5], [6], drafter=DrafterVersion("ngram", "builtin"), draft_prob=None),
    ]
    first, second = spans_of(make_capture(), make_turn(steps))
    assert first.drafter == DFLASH
    assert first.draft_prob == ((0.9,),)
    assert second.draft_prob is None


@pytest.mark.parametrize(
    ("committed", "drafted", "changes", "censored"),
    [
        ([5], [6, 7], {}, False),
        ([5, 6], [5], {}, False),
        ([5, 6], [5, 6, 7], {"block_length": 1, "accepted": 1}, True),
        ([5, 6], [5, 6, 7], {}, True),
    ],
    ids=["rejected", "all verified", "longer than verified", "ended by a stop inside"],
)
def test_a_span_is_censored_where_no_rejection_ended_a_step(
    committed: list[int], drafted: list[int], changes: dict[str, int], censored: bool
) -> None:
    step = make_step(3, committed, drafted, **changes)
    (span,) = spans_of(make_capture(baseline_share=1.0), make_turn([step]))
    assert span.censored == censored


def test_choices_and_prompts_of_one_request_are_told_apart() -> None:
    steps = [make_step(3, [5], [6])]
    turns = [make_turn(steps, choice=0), make_turn(steps, choice=1), make_turn(steps, request_id="r-1")]
    ids = [event.id for turn in turns for event in make_capture()(turn).events]
    assert len(set(ids)) == len(ids) == 6


def test_what_a_quota_keeps_out_is_counted_by_reason_and_an_hour_later_there_is_room() -> None:
    capture = make_capture(spans_per_hour=1, tool_calls=[(0, 2)])
    steps = [make_step(3, [5], [6])]
    first, second = (capture(make_turn(steps, request_id=name)) for name in "ab")
    assert [dict(each.over_quota) for each in (first, second)] == [{"tool_call": 1}, {"rejected": 1, "tool_call": 1}]
    assert len(second.events) == 1, "the turn itself is always kept"
    assert second.context is None
    other = capture(make_turn(steps, principal=Principal("other")))
    assert len(other.events) == 2, "a quota is a tenant's own"
    assert len(capture(make_turn(steps, request_id="c", time=1000.0 + 3600)).events) == 2
    assert len(capture(make_turn(steps, request_id="d", time=1000.0)).events) == 2, "a clock set back stops nothing"


@pytest.mark.parametrize("steps", [[], [make_step(3, [5], [6])]], ids=["no steps", "steps"])
def test_tokens_over_quota_are_not_kept_and_nothing_refers_to_them(steps: Any) -> None:
    captured = make_capture(baseline_share=1.0, context_tokens_per_hour=3)(make_turn(steps))
    (event,) = captured.events
    assert isinstance(event, TurnEvent)
    assert event.baseline
    assert event.context is None
    assert captured.context is None
    assert dict(captured.over_quota) == {"baseline": 1}


def test_no_event_names_a_session_as_its_client_does() -> None:
    steps = [make_step(3, [5], [6])]
    captured = make_capture()(make_turn(steps, session_id="secret-name"))
    assert b"secret-name" not in msgspec.msgpack.encode((captured.events, captured.context))


def test_events_of_an_earlier_writer_lack_what_is_new_and_are_read() -> None:
    event = turn_of(make_capture(), make_turn([make_step(3, [5], [6])]))
    raw = msgspec.to_builtins(event)
    del raw["finish_reason"]
    raw["of_a_later_schema"] = [1]
    assert msgspec.convert(raw, TurnEvent, strict=False) == event
    assert isinstance(event.counts[0], StepCounts)

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.engine.types import GREEDY, DrafterVersion, SamplingParams
from redraft.feedback.contexts import TurnContext, context_id
from redraft.feedback.events import Event, Origin, Reason, SpanEvent, TurnEvent, event_id
from redraft.retrain.data.sample import Sample
from redraft.retrain.traffic import TrafficData, collect, with_later_gate
from redraft.retrain.traffic_config import TrafficConfig

from .conftest import random_tokens

pytestmark = pytest.mark.unit

TARGET = "target"


class Contexts:
    """A `ContextStore` in memory, as much of it as is read."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], TurnContext] = {}

    def put(self, context: TurnContext) -> str:
        name = context_id(context)
        self.kept[context.tenant, name] = context
        return name

    def get(self, tenant: str, context_id: str) -> TurnContext | None:
        return self.kept.get((tenant, context_id))


class Traffic:
    """Events and contexts of turns that were served."""

    def __init__(self) -> None:
        self.contexts = Contexts()
        self.events: list[Event] = []

    def turn(
        self,
        session: str,
        time: float,
        tokens: Sequence[int],
        prompt: int,
        *spans: tuple[int, int, Reason],
        baseline: bool = False,
        probability: float = 1.0,
        target: str = TARGET,
        sampling: SamplingParams = GREEDY,
        tenant: str = "tenant",
        agent: str = "agent",
        constrained: bool = False,
    ) -> str:
        context = TurnContext(
            tenant=tenant,
            session=session,
            time=time,
            target=target,
            token_ids=tuple(tokens),
            prompt_tokens=prompt,
            sampling=sampling,
        )
        name = self.contexts.put(context)
        request = f"{session}/{time}/{len(self.events)}"
        origin = Origin(
            tenant=tenant,
            agent_type=agent,
            session=session,
            request_id=request,
            choice=0,
            target=target,
            tokenizer="",
            template="",
        )
        shared: dict[str, Any] = {
            "time": time,
            "origin": origin,
            "sampling": sampling,
            "constrained": constrained,
            "context": name,
            "probability": probability,
        }
        self.events.append(
            TurnEvent(
                id=event_id(request, 0, prompt, "turn"),
                prompt_tokens=prompt,
                completion_tokens=len(tokens) - prompt,
                looping=False,
                baseline=baseline,
                counts=(),
                **shared,
            )
        )
        for start, end, reason in spans:
            self.events.append(
                SpanEvent(
                    id=event_id(request, 0, start, reason),
                    drafter=DrafterVersion("dflash", "1"),
                    start=start,
                    end=end,
                    block_length=(),
                    rows_verified=0,
                    accepted=(),
                    drafted=(),
                    target_tokens=(),
                    draft_prob=None,
                    entropies=None,
                    censored=False,
                    reason=reason,
                    **shared,
                )
            )
        return name

    def collect(self, since: float = 0.0, **changes: Any) -> TrafficData:
        return collect(self.events, self.contexts, target=TARGET, since=since, config=config(**changes))  # type: ignore[arg-type]


def config(**changes: Any) -> TrafficConfig:
    return TrafficConfig(**{"validation_share": 0.0, "anchor_share": 0.0, "margin": 1, **changes})


def sessions(samples: Sequence[Sample]) -> set[str]:
    return {sample.session for sample in samples}


turns = st.lists(
    st.tuples(
        st.integers(0, 12),  # session
        st.integers(0, 40),  # time
        st.sampled_from((0, 1, 5, 9)),  # contents: few, so that sessions repeat one another
        st.sampled_from(("none", "rejected", "entropy", "baseline")),
        st.sampled_from((TARGET, TARGET, TARGET, "another")),
    ),
    max_size=60,
)


def served(drawn: Sequence[tuple[int, int, int, str, str]]) -> Traffic:
    traffic = Traffic()
    for session, time, content, kind, target in drawn:
        tokens = random_tokens(40, content % 4)[: 8 + content]  # contents 1, 5 and 9 go on from one another
        prompt = len(tokens) - 3
        baseline = session % 2 == 0
        spans: list[tuple[int, int, Reason]] = []
        if kind != "none":
            spans = [(prompt + 1, prompt + 3, "baseline" if baseline else "rejected" if kind == "baseline" else kind)]  # type: ignore[list-item]
        traffic.turn(f"s{session}", time, tokens, prompt, *spans, baseline=baseline, target=target)
    return traffic


@settings(max_examples=150, deadline=None)
@given(drawn=turns, since=st.integers(0, 41), later=turns, shares=st.tuples(*[st.sampled_from((0.0, 0.3, 0.8))] * 4))
def test_no_session_and_no_turn_is_both_learnt_from_and_judged_by(
    drawn: Sequence[tuple[int, int, int, str, str]],
    since: int,
    later: Sequence[tuple[int, int, int, str, str]],
    shares: tuple[float, float, float, float],
) -> None:
    names = ("gate_share", "anchor_share", "validation_share", "replay_share")
    chosen = config(**dict(zip(names, shares, strict=True)))
    traffic = served(drawn)
    data = collect(traffic.events, traffic.contexts, target=TARGET, since=since, config=chosen)  # type: ignore[arg-type]
    much_later = [(session, time + 41, content, kind, target) for session, time, content, kind, target in later]
    more = served([*drawn, *much_later])
    data_later = with_later_gate(data, more.events, more.contexts, chosen)  # type: ignore[arg-type]
    assert data_later.train == data.train
    assert sessions(data.gate) <= sessions(data_later.gate)
    by_session: dict[str, list[float]] = {}
    for event in more.events:
        if event.origin.target == TARGET:
            by_session.setdefault(event.origin.session, []).append(event.time)
    for gate in (data.gate, data_later.gate):
        learnt, judging = [*data.train, *data.replay], [*gate, *data.anchor]
        sides = [sessions(side) for side in (data.train, data.replay, data.validation, gate, data.anchor)]
        assert sum(map(len, sides)) == len(set().union(*sides)), "a session is on two sides"
        for one, other in ((learnt, judging), (learnt, data.validation), (data.validation, judging)):
            assert not turns_of(one, more) & turns_of(other, more), "a turn is on two sides"
        last = max((traffic.contexts.kept["tenant", each.id].time for each in learnt), default=-1.0)
        for session in sessions(gate):
            assert min(by_session[session]) >= data.cut > last
            assert int(session[1:]) % 2 == 0, "not a baseline session"
        for session in sessions(data.anchor):
            assert max(time for time in by_session[session] if time < 41) < since
    for sample in [*data.train, *data.replay, *data.validation, *data.gate, *data.anchor]:
        assert 0 < sample.weight < 100
        assert sample.spans == tuple(sorted(sample.spans))
        assert all(5 <= start < end <= len(sample.token_ids) for start, end in sample.spans)


def turns_of(samples: Sequence[Sample], traffic: Traffic) -> set[tuple[int, ...]]:
    """The tokens of each turn of the samples' sessions in whose answer something is supervised."""
    return {
        context.token_ids
        for sample in samples
        for context in traffic.contexts.kept.values()
        if context.session == sample.session
        and sample.token_ids[: len(context.token_ids)] == context.token_ids
        and any(start < len(context.token_ids) and end > context.prompt_tokens for start, end in sample.spans)
    }


@settings(max_examples=100, deadline=None)
@given(drawn=turns, since=st.integers(0, 41), seed=st.integers(0, 1 << 16))
def test_neither_order_nor_repetition_of_events_matters(
    drawn: Sequence[tuple[int, int, int, str, str]], since: int, seed: int
) -> None:
    traffic = served(drawn)
    chosen = config(anchor_share=0.4, validation_share=0.3)
    shuffled = [*traffic.events, *random.Random(seed).choices(traffic.events, k=len(traffic.events))]
    random.Random(seed).shuffle(shuffled)
    one, other = (
        collect(events, traffic.contexts, target=TARGET, since=since, config=chosen)  # type: ignore[arg-type]
        for events in (traffic.events, shuffled)
    )
    assert msgspec.structs.asdict(one) == msgspec.structs.asdict(other)


def test_the_latest_baseline_sessions_judge_and_what_began_before_them_is_learnt_from_up_to_there() -> None:
    traffic = Traffic()
    for number in range(10):
        traffic.turn(f"b{number}", number, random_tokens(20, number), 10, (11, 20, "baseline"), baseline=True)
    traffic.turn("long", 3, random_tokens(20, 100), 10, (12, 14, "rejected"))
    traffic.turn("long", 8, random_tokens(20, 101), 10, (12, 14, "rejected"))
    traffic.turn("new", 8, random_tokens(20, 102), 10, (12, 14, "rejected"))
    data = traffic.collect(gate_share=0.3)
    assert data.cut == 7
    assert sessions(data.gate) == {"b7", "b8", "b9"}
    assert sessions(data.train) == {"b0", "b1", "b2", "b3", "b4", "b5", "b6", "long"}
    assert data.left_out == {"after the cut": 2}

    traffic.turn("b11", 11, random_tokens(20, 11), 10, baseline=True)
    traffic.turn("long", 12, random_tokens(20, 12), 10, baseline=True)
    traffic.turn("b12", 12, random_tokens(20, 0), 10, baseline=True)  # says again what b0 said
    traffic.turn("plain", 12, random_tokens(20, 13), 10)
    more = with_later_gate(data, traffic.events, traffic.contexts, config())  # type: ignore[arg-type]
    assert sessions(more.gate) == {"b7", "b8", "b9", "b11"}


def test_what_came_before_the_period_is_replayed_or_an_anchor_that_stays_one() -> None:
    traffic = Traffic()
    for number in range(60):
        traffic.turn(f"b{number}", number, random_tokens(20, number), 10, (11, 20, "baseline"), baseline=True)
    early, late = (traffic.collect(since=since, anchor_share=0.4, gate_share=0.1) for since in (20.0, 50.0))
    assert 0 < len(early.anchor) < 20
    assert sessions(early.anchor) < sessions(late.anchor)
    for data in (early, late):
        assert len(data.anchor) + len(data.replay) == (20 if data is early else 50)
        learnt = sessions(data.train) | sessions(data.replay)
        assert not learnt & sessions(late.anchor), "an anchor of a later run is learnt from in an earlier one"
        assert data.left_out["a later run's anchor"] > 0


def test_judging_takes_no_more_sessions_than_it_may_and_none_of_the_others_is_learnt_from() -> None:
    traffic = Traffic()
    for number in range(60):
        traffic.turn(f"b{number}", number, random_tokens(20, number), 10, (11, 20, "baseline"), baseline=True)
    shares = {"since": 30.0, "anchor_share": 0.5, "gate_share": 0.5}
    every, few = traffic.collect(**shares), traffic.collect(**shares, judging_sessions=4)
    for side in ("gate", "anchor"):
        kept, all_ = sessions(getattr(few, side)), sessions(getattr(every, side))
        assert len(kept) == 4
        assert kept < all_
        assert not (sessions(few.train) | sessions(few.replay) | sessions(few.validation)) & all_
    assert few.train == every.train


def test_replay_is_its_share_of_all_draws() -> None:
    traffic = Traffic()
    for number in range(40):
        traffic.turn(f"s{number}", number, random_tokens(20, number), 10, (12, 14, "rejected"))
    for share in (0.0, 0.25, 0.5):
        data = traffic.collect(since=30.0, replay_share=share)
        train, replay = (sum(sample.weight for sample in side) for side in (data.train, data.replay))
        assert replay / (train + replay) == pytest.approx(share)


def test_turns_that_begin_one_another_become_one_sample_and_the_others_stay_apart() -> None:
    traffic = Traffic()
    first = random_tokens(20, 1)
    second = [*first, *random_tokens(15, 2)]
    traffic.turn("s", 1, first, 10, (14, 16, "rejected"))
    traffic.turn("s", 2, second, 26, (30, 32, "rejected"))
    traffic.turn("s", 3, [*first[:15], *random_tokens(10, 3)], 18, (20, 22, "rejected"))  # history was rewritten
    traffic.turn("s", 4, [*second, *random_tokens(9, 4)], 40, (42, 43, "rejected"), sampling=SamplingParams(seed=1))
    data = traffic.collect()
    assert sorted((len(sample.token_ids), sample.spans, sample.greedy) for sample in data.train) == [
        (25, ((19, 23),), True),
        (35, ((13, 17), (29, 33)), True),
        (44, ((41, 44),), False),
    ]


def test_another_choice_of_the_same_prompt_is_a_sample_of_its_own() -> None:
    traffic = Traffic()
    tokens = random_tokens(30, 1)
    traffic.turn("s", 1, tokens[:20], 10, (12, 14, "rejected"))
    traffic.turn("s", 1, tokens, 10, (12, 14, "rejected"))
    assert sorted(len(sample.token_ids) for sample in traffic.collect().train) == [20, 30]


def test_a_sample_weighs_the_mean_over_its_tokens_of_why_they_were_kept() -> None:
    traffic = Traffic()
    traffic.turn("one", 1, random_tokens(40, 1), 10, (12, 14, "rejected"), (30, 36, "entropy"))
    traffic.turn("rare", 1, random_tokens(40, 2), 10, (12, 14, "rejected"), probability=0.5)
    traffic.turn("rarest", 1, random_tokens(40, 3), 10, (12, 14, "rejected"), probability=0.01)
    traffic.turn("both", 1, random_tokens(40, 4), 10, (12, 14, "rejected"), (12, 14, "entropy"))
    traffic.turn("whole", 1, random_tokens(40, 5), 10, (11, 40, "baseline"), baseline=True, probability=0.5)
    data = traffic.collect(gate_share=0.0)
    weights = {sample.session: sample.weight for sample in data.train}
    assert weights == pytest.approx({"one": (4 * 1.0 + 8 * 0.25) / 12, "rare": 2, "rarest": 4, "both": 1, "whole": 0.5})
    assert {sample.spans for sample in data.train if sample.session == "whole"} == {((10, 40),)}


def test_what_nothing_came_of_is_counted_by_why() -> None:
    traffic = Traffic()
    missing = traffic.turn("missing", 1, random_tokens(20, 1), 10, (12, 14, "rejected"))
    traffic.turn("foreign", 1, random_tokens(20, 2), 10, (12, 14, "rejected"), target="another")
    traffic.turn("long", 1, random_tokens(120, 3), 10, (12, 14, "rejected"))
    traffic.turn("looping", 1, random_tokens(10, 4) + [5, 6] * 40, 10, (12, 14, "rejected"))
    traffic.turn("short", 1, random_tokens(20, 5), 19)
    traffic.turn("nothing", 1, random_tokens(20, 6), 10)
    traffic.turn("good", 1, random_tokens(20, 7), 10, (12, 14, "rejected"))
    traffic.turn("looping judge", 2, random_tokens(10, 8) + [5, 6] * 40, 10, baseline=True)
    traffic.turn("judge", 3, random_tokens(20, 9), 10, baseline=True)
    traffic.turn("copy", 1, random_tokens(20, 9), 10, (12, 14, "rejected"))
    del traffic.contexts.kept["tenant", missing]
    data = traffic.collect(max_tokens=100, gate_share=1.0)
    assert sessions(data.train) == {"good"}
    assert {sample.session: sample.looping for sample in data.gate} == {"judge": False, "looping judge": True}
    assert data.left_out == {
        "missing": 1,
        "another target": 1,
        "too long": 1,
        "too short": 1,
        "looping": 1,
        "no span": 1,
        "held out": 1,
    }


def test_no_traffic_is_no_data() -> None:
    data = Traffic().collect(since=5.0)
    assert not (data.train or data.replay or data.validation or data.gate or data.anchor)
    assert data.cut > 5


def test_answers_that_more_than_the_target_decided_judge_nothing_but_are_learnt_from() -> None:
    traffic = Traffic()
    for number in range(4):
        traffic.turn(f"b{number}", number, random_tokens(20, number), 10, (11, 20, "baseline"), baseline=True)
    biased, penalised = (
        msgspec.structs.replace(GREEDY, **change)
        for change in ({"logit_bias": ((5, 1.0),)}, {"repetition_penalty": 1.1})
    )
    for number, changes in ((4, {"constrained": True}), (5, {"sampling": biased}), (6, {"sampling": penalised})):
        traffic.turn(f"b{number}", number, random_tokens(20, number), 10, baseline=True, **changes)  # type: ignore[arg-type]
    data = traffic.collect(gate_share=0.5)
    assert sessions(data.gate) == {"b3"}
    assert data.left_out["steered"] == 3
    assert sessions(traffic.collect(gate_share=0.0).train) == {f"b{number}" for number in range(7)}

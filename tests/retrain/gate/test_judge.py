from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redraft.engine.drafters.loading import content_id
from redraft.engine.types import Stratum
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import TrainingError
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.judge import judge
from redraft.retrain.gate.poisoned import deepened
from redraft.retrain.gate.report import Report
from redraft.retrain.gate.seen import TrainingRecord

from .conftest import Built, cost_table

pytestmark = pytest.mark.unit

CONFIG = GateConfig(min_sessions=4, min_anchor_sessions=4, draws=1000, parity_sessions=2)

Judge = Callable[..., Report]


@pytest.fixture
def judged(
    sessions: list[Sample], untrained: Path, trained: Path, target: FrozenTarget, engine: Callable[[Path], Built]
) -> Judge:
    def run(**changes: Any) -> Report:
        arguments: dict[str, Any] = {
            "gate": sessions,
            "anchors": [msgspec.structs.replace(each, session=f"anchor {each.session}") for each in sessions],
            "old": untrained,
            "new": trained,
            "target": target,
            "costs": cost_table(content_id(untrained), content_id(trained)),
            "engine": engine,
            "seen": TrainingRecord(),
            "block_length": 3,
            "config": CONFIG,
        }
        return judge(**(arguments | changes))

    return run


def test_a_better_drafter_is_accepted_and_the_engine_does_what_the_replay_says(judged: Judge) -> None:
    report = judged()
    assert report.outcome == "accepted", report.verdict
    assert report.parity is not None
    assert report.parity.reproduced == report.parity.answers == 2
    assert report.parity.violations == 0
    assert report.parity.engine_steps == report.parity.replay_steps
    assert report.new_traffic is not None
    assert report.new_traffic.new.tau is not None
    assert report.new_traffic.new.tau > 2
    assert report.draft_cost is not None
    assert report.draft_cost.same_shape


def test_judging_again_with_the_seed_gives_the_same_numbers(judged: Judge) -> None:
    one, other = (msgspec.structs.replace(judged(), time="", draft_cost=None) for _ in range(2))
    assert one == other


def test_a_worse_drafter_is_refused_and_every_broken_rule_is_named(
    judged: Judge, trained: Path, untrained: Path
) -> None:
    report = judged(old=trained, new=untrained)
    assert (report.outcome, report.rule) == ("refused", "anchors_lost")
    assert "not_better" in report.verdict.rules


def test_the_same_drafter_again_is_no_better(judged: Judge, trained: Path) -> None:
    report = judged(old=trained)
    assert (report.outcome, report.rule) == ("refused", "not_better")


def test_a_better_drafter_that_learnt_from_a_judging_session_is_refused_unread(
    judged: Judge, sessions: list[Sample]
) -> None:
    report = judged(seen=TrainingRecord.of(sessions[2:3]))
    assert (report.outcome, report.rule) == ("refused", "leaked")
    assert sessions[2].session in report.leak.named
    assert report.new_traffic is None


def test_sessions_that_training_saw_under_another_name_are_set_aside_until_they_are_most(
    judged: Judge, sessions: list[Sample]
) -> None:
    renamed = [msgspec.structs.replace(each, id="?", session="?") for each in sessions]
    report = judged(seen=TrainingRecord.of(renamed[:2]))
    assert report.new_traffic is not None
    assert report.new_traffic.sessions == len(sessions) - 2
    assert len(report.leak.set_aside) == 4, "two of new traffic, and the same two as anchors"
    assert judged(seen=TrainingRecord.of(renamed[:6])).rule == "leaked"


def test_a_drafter_that_drafts_as_well_at_a_higher_price_is_slower(
    judged: Judge, untrained: Path, trained: Path, tmp_path: Path
) -> None:
    deepened(trained, tmp_path / "deep", 32)
    costs = cost_table(content_id(trained), content_id(untrained), verify=1.0, draft=10.0)
    report = judged(old=trained, new=tmp_path / "deep", costs=costs)
    assert report.draft_cost is not None
    assert report.draft_cost.ratio is not None
    assert report.draft_cost.ratio > 1.5
    assert report.new_traffic is not None
    assert report.new_traffic.old.tau == report.new_traffic.new.tau, "what was added changes no draft"
    assert report.outcome == "refused"
    better = judged(new=tmp_path / "deep", costs=costs, block_length=3)
    assert better.rule == "slower"


def test_sampled_and_overlong_answers_judge_nobody(judged: Judge, sessions: list[Sample]) -> None:
    sampled = [msgspec.structs.replace(each, greedy=False, session="sampled") for each in sessions]
    report = judged(gate=[*sessions, *sampled])
    assert report.unusable == len(sampled)
    assert report.new_traffic is not None
    assert report.new_traffic.sessions == len(sessions)


def test_the_engine_must_take_the_steps_that_replay_says(judged: Judge, untrained: Path, engine: Any) -> None:
    """An engine that serves another drafter than the one replayed."""
    report = judged(engine=lambda folder: engine(untrained))
    assert (report.outcome, report.rule) == ("refused", "parity")


def test_answers_that_the_engine_does_not_give_again_prove_nothing(judged: Judge, sessions: list[Sample]) -> None:
    foreign = [
        msgspec.structs.replace(each, token_ids=(*each.token_ids[:-1], (each.token_ids[-1] + 1) % 250))
        for each in sessions
    ]
    report = judged(gate=foreign)
    assert report.parity is not None
    assert report.parity.reproduced == 0
    assert report.outcome != "accepted"


def test_the_first_trained_drafter_is_judged_against_the_floor(judged: Judge) -> None:
    report = judged(old=None, costs=cost_table(verify=1000.0))
    assert report.old.kind == "ngram"
    assert report.draft_cost is not None
    assert report.draft_cost.ratio is None
    assert report.outcome == "accepted", report.verdict


def test_references_for_drift_come_by_stratum_from_new_traffic_alone(judged: Judge, sessions: list[Sample]) -> None:
    def stratum(sample: Sample, bucket: int) -> Stratum:
        agent = "one" if sample.session == sessions[0].session else "many"
        return Stratum("tenant", agent, bucket, "greedy", False)

    report = judged(stratum=stratum)
    (reference,) = report.references
    assert reference.stratum.agent_type == "many", "one session makes no reference"
    assert reference.sessions == len(sessions) - 1
    assert reference.drafter == report.new


def test_references_are_of_the_context_that_a_step_had_not_of_the_whole_session(
    judged: Judge, sessions: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redraft.engine.types.FIRST_CONTEXT_BUCKET", 40)
    report = judged(stratum=lambda sample, bucket: Stratum("tenant", "agent", bucket, "greedy", False))
    assert report.new_traffic is not None
    short, long = sorted(report.references, key=lambda reference: reference.stratum.context_bucket)
    assert (short.stratum.context_bucket, long.stratum.context_bucket) == (40, 80)
    assert all(len(sample.token_ids) > 40 for sample in sessions), "each session ends in the second bucket"
    assert short.reached[0] + long.reached[0] == report.new_traffic.new.reached[0]


def test_the_old_drafter_must_have_been_measured(judged: Judge) -> None:
    with pytest.raises(TrainingError, match="has not measured"):
        judged(costs=cost_table("another"))

"""One turn of the loop on a tiny target: captured traffic to a judged candidate in the registry."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redraft.engine.drafters.loading import version_of
from redraft.engine.types import DrafterPointer, DrafterVersion, SamplingParams
from redraft.retrain.config import TrainConfig
from redraft.retrain.errors import Stopped, TrainingError
from redraft.retrain.features_store import LocalStore, MemoryStore
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.seen import TrainingRecord
from redraft.retrain.loop import Loop
from redraft.retrain.loop_config import RUN_DATA, RetrainConfig
from redraft.retrain.period import Period
from redraft.retrain.registry.record import VersionRecord
from redraft.retrain.registry.registry import Registry
from redraft.retrain.traffic_config import TrafficConfig

from .conftest import PARADIGMS, random_tokens, serve
from .gate.conftest import Built, cost_table
from .gate.conftest import engine as engine
from .test_traffic import Traffic

pytestmark = pytest.mark.unit

SINCE = 100.0
PERIOD = Period(SINCE, "drop in tenant/agent")
RECIPE = TrainConfig(
    steps=80, sequences=2, blocks=24, warmup=5, learning_rate=3e-3, eval_every=40, save_every=40, held_out=4
)


@pytest.fixture(scope="module")
def served(target: FrozenTarget, checkpoint: Path) -> list[list[int]]:
    """Prompts of their own with one answer, but for the last: it has the target's, which is given again."""
    answer = random_tokens(12, 77) * 2
    prompts = [random_tokens(30, seed) for seed in range(36)]
    own = serve(target, checkpoint, prompts[-1], None, length=3, stop=319, most=24).tokens
    return [[*prompt, *answer] for prompt in prompts[:-1]] + [[*prompts[-1], *own]]


@pytest.fixture
def traffic(served: list[list[int]], target: FrozenTarget) -> Traffic:
    traffic = Traffic()
    for number, tokens in enumerate(served):
        time = number + (0.0 if number < 12 else SINCE)
        traffic.turn(f"session-{number}", time, tokens, 30, baseline=True, target=target.identity)
    return traffic


@pytest.fixture
def serving(request: pytest.FixtureRequest, target: FrozenTarget, tmp_path: Path) -> DrafterVersion:
    PARADIGMS[getattr(request, "param", "dflash")](target).save(tmp_path / "serving", card="")
    version = version_of(tmp_path / "serving")
    record = VersionRecord(version=version, target=target.identity, origin="imported", why="a test")
    return Registry(tmp_path / "registry", target.identity).add(tmp_path / "serving", record, who="test")


Make = Callable[..., Loop]


@pytest.fixture
def make(
    traffic: Traffic, serving: DrafterVersion, target: FrozenTarget, engine: Callable[[Path], Built], tmp_path: Path
) -> Make:
    def make(**changes: Any) -> Loop:
        arguments: dict[str, Any] = {
            "folder": tmp_path / "runs",
            "events": lambda: traffic.events,
            "contexts": traffic.contexts,
            "registry": Registry(tmp_path / "registry", target.identity),
            "target": target,
            "features": MemoryStore(1 << 24),
            "recipe": RECIPE,
            "traffic": TrafficConfig(gate_share=0.5, anchor_share=0.5, validation_share=0.2),
            "gate": GateConfig(min_sessions=3, min_anchor_sessions=3, draws=1000, parity_sessions=20),
            "costs": cost_table(serving.id),
            "engine": engine,
            "block_length": 3,
            "busy": lambda: False,
        }
        return Loop(**(arguments | changes))

    return make


@pytest.mark.parametrize("serving", ["dflash", "eagle3 of 1 layer", "mtp"], indirect=True)
def test_traffic_in_which_the_drafter_is_rejected_gives_a_better_one(make: Make, serving: DrafterVersion) -> None:
    loop = make()
    outcome = loop.run_once(serving, PERIOD)
    assert outcome.result == "accepted", outcome
    assert outcome.version is not None
    entered = loop.registry.get(outcome.version)
    assert entered.state == "accepted"
    assert entered.record.parent == serving
    assert entered.record.why == PERIOD.why
    assert entered.record.provenance is not None
    assert entered.record.provenance.initial == serving.id
    assert entered.gate is not None
    assert entered.gate.accept_length.tau is not None
    assert entered.gate.accept_length.tau > 1.2
    assert outcome.report is not None
    assert Path(outcome.report).read_text().startswith("# Accepted")
    assert {reference.stratum.agent_type for reference in entered.references} == {"agent"}


def test_a_finished_run_keeps_no_tokens(make: Make, serving: DrafterVersion, served: list[list[int]]) -> None:
    loop = make()
    loop.run_once(serving, PERIOD)
    (run,) = (each for each in loop.folder.iterdir() if each.is_dir())
    assert not (run / RUN_DATA).exists()
    text = ", ".join(map(str, served[0][:8]))
    assert not any(text in file.read_text(errors="ignore") for file in run.rglob("*") if file.is_file())


def test_a_second_candidate_against_the_same_version_is_held_to_more(make: Make, serving: DrafterVersion) -> None:
    loop = make()
    first = loop.run_once(serving, PERIOD)
    second = make(recipe=RECIPE.model_copy(update={"seed": 1})).run_once(serving, PERIOD)
    assert second.version != first.version
    looks = [json.loads((loop.folder / f"0000{n}" / "gate" / "report.json").read_text())["look"] for n in (1, 2)]
    assert looks == [1, 2]


def test_a_run_that_was_stopped_goes_on_with_the_data_it_began_with(
    make: Make, serving: DrafterVersion, traffic: Traffic
) -> None:
    class Interrupted(MemoryStore):
        def put(self, *arguments: Any) -> None:
            raise Stopped("asked to stop")

    with pytest.raises(Stopped):
        make(features=Interrupted(1 << 20)).run_once(serving, PERIOD)
    loop = make()
    (run,) = (each for each in loop.folder.iterdir() if each.is_dir())
    before = (run / RUN_DATA).read_bytes()
    del traffic.events[12:]
    assert loop.run_once(serving, Period(0.0, "another reason")).version is not None
    assert [each for each in loop.folder.iterdir() if each.is_dir()] == [run]
    assert before
    (entered,) = (each for each in loop.registry.all() if each.record.parent)
    assert entered.record.why == PERIOD.why


def test_a_stopped_run_of_a_version_that_no_longer_serves_is_given_up(make: Make, serving: DrafterVersion) -> None:
    loop = make(events=list)
    loop.folder.mkdir(parents=True)
    (loop.folder / "00001").mkdir()
    (loop.folder / "00001" / "run.json").write_text(
        json.dumps({"serving": {"kind": "dflash", "id": "gone"}, "period": {"since": 0.0, "why": "x"}})
    )
    loop.run_once(serving, PERIOD)
    assert json.loads((loop.folder / "00001" / "outcome.json").read_text())["result"] == "refused"
    assert json.loads((loop.folder / "00002" / "outcome.json").read_text())["result"] == "too little"


def test_too_little_traffic_is_said_with_what_is_missing(make: Make, serving: DrafterVersion) -> None:
    loop = make(gate=GateConfig())
    outcome = loop.run_once(serving, PERIOD)
    assert outcome.result == "too little"
    assert "of 20 anchor sessions" in outcome.reason
    assert [each.version for each in loop.registry.all()] == [serving]


def test_nothing_is_trained_that_only_sampled_answers_could_judge(
    make: Make, serving: DrafterVersion, served: list[list[int]], target: FrozenTarget
) -> None:
    sampled = Traffic()
    for number, tokens in enumerate(served):
        time = number + (0.0 if number < 12 else SINCE)
        arguments = {"baseline": True, "target": target.identity, "sampling": SamplingParams()}
        sampled.turn(f"session-{number}", time, tokens, 30, **arguments)  # type: ignore[arg-type]
    outcome = make(events=lambda: sampled.events, contexts=sampled.contexts).run_once(serving, PERIOD)
    assert outcome.result == "too little"
    assert "0 of 3 sessions to judge by with greedy answers" in outcome.reason


def test_two_runs_at_once_are_one_and_a_refusal_in_words(make: Make, serving: DrafterVersion) -> None:
    loop = make()
    loop.folder.mkdir(parents=True)
    held = os.open(loop.folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(TrainingError, match="under way already"):
            loop.run_once(serving, PERIOD)
    finally:
        os.close(held)


def test_sessions_that_came_while_it_trained_judge_it_too(
    make: Make, serving: DrafterVersion, traffic: Traffic
) -> None:
    reads = iter([traffic.events[:26], traffic.events])
    outcome = make(events=lambda: next(reads)).run_once(serving, PERIOD)
    assert outcome.report is not None
    report = json.loads((Path(outcome.report).parent / "report.json").read_text())
    begun_before = round(0.5 * 14)
    assert report["new_traffic"]["sessions"] == begun_before + 10


def test_training_that_comes_to_a_judged_version_again_ends_as_that_was_judged(
    make: Make, serving: DrafterVersion
) -> None:
    loop = make()
    first = loop.run_once(serving, PERIOD)
    again = loop.run_once(serving, PERIOD)
    assert (again.result, again.version, again.report) == (first.result, first.version, first.report)
    assert "once more" in again.reason
    assert first.version and first.result == "accepted"
    pointer = DrafterPointer(target=loop.registry.target, serving=first.version, previous=serving, token=1)
    loop.registry.follow(pointer, who="test", why="better", left="retired")
    by_now = loop.run_once(serving, PERIOD)
    assert by_now.result == "accepted" and "which is serving" in by_now.reason
    assert (loop.folder / "00002" / "outcome.json").exists(), "nothing is left that the next run would stumble over"


def test_where_a_lost_record_hides_ancestors_all_that_was_learnt_from_rules_sessions_out(
    make: Make, serving: DrafterVersion
) -> None:
    loop = make()
    child, parent = DrafterVersion("dflash", "c" * 16), DrafterVersion("dflash", "b" * 16)
    record = VersionRecord(version=child, target=loop.registry.target, origin="trained", why="test", parent=parent)
    loop.registry.add(None, record, who="test")
    loop.folder.mkdir()
    for name in (child.id, "a" * 16):
        seen = TrainingRecord(sessions=frozenset({name}))
        (loop.folder / f"seen-{name}.msgpack").write_bytes(msgspec.msgpack.encode(seen))
    assert loop._seen(child).sessions == {child.id, "a" * 16}
    loop.registry.add(None, msgspec.structs.replace(record, version=parent, parent=None), who="test")
    assert loop._seen(child).sessions == {child.id}


def test_judging_one_candidate_again_is_another_look(make: Make, serving: DrafterVersion) -> None:
    cautious = GateConfig(min_sessions=15, min_anchor_sessions=3, draws=1000, parity_sessions=20)
    loop = make(gate=cautious)
    first, second = loop.run_once(serving, PERIOD), loop.run_once(serving, PERIOD)
    assert first.version == second.version
    assert first.result == second.result == "inconclusive"
    looks = [json.loads((loop.folder / f"0000{n}" / "gate" / "report.json").read_text())["look"] for n in (1, 2)]
    assert looks == [1, 2]


def test_a_run_that_cannot_go_on_is_given_up_and_the_next_begins_anew(make: Make, serving: DrafterVersion) -> None:
    class Interrupted(MemoryStore):
        def put(self, *arguments: Any) -> None:
            raise Stopped("asked to stop")

    with pytest.raises(Stopped):
        make(features=Interrupted(1 << 20)).run_once(serving, PERIOD)
    loop = make()
    (loop.folder / "00001" / RUN_DATA).write_bytes(b"of another release")
    with pytest.raises(TrainingError, match="next run collects anew"):
        loop.run_once(serving, PERIOD)
    assert json.loads((loop.folder / "00001" / "outcome.json").read_text())["result"] == "refused"
    assert not (loop.folder / "00001" / RUN_DATA).exists()
    assert loop.run_once(serving, PERIOD).version is not None


def test_a_beginning_that_cannot_be_read_is_given_up(make: Make, serving: DrafterVersion) -> None:
    loop = make(events=list)
    (loop.folder / "²").mkdir(parents=True)
    (loop.folder / "00001").mkdir()
    (loop.folder / "00001" / "run.json").write_bytes(b"")
    assert loop.run_once(serving, PERIOD).result == "too little"
    assert (loop.folder / "00001" / "outcome.json").exists()


def test_nothing_is_trained_from_a_version_whose_drafts_the_engine_has_not_measured(
    make: Make, serving: DrafterVersion
) -> None:
    loop = make(costs=cost_table("another"))
    with pytest.raises(TrainingError, match="has not measured"):
        loop.run_once(serving, PERIOD)
    assert not [each for each in loop.folder.iterdir() if each.is_dir()]


def test_erasure_reaches_the_features_and_the_data_of_a_stopped_run_which_begins_anew(
    make: Make, serving: DrafterVersion, tmp_path: Path
) -> None:
    class Stopping(LocalStore):
        def put(self, *arguments: Any) -> None:
            super().put(*arguments)
            raise Stopped("asked to stop")

    config = RetrainConfig(folder=tmp_path / "home")
    folder = config.runs / "target"
    with pytest.raises(Stopped):
        make(folder=folder, features=Stopping(config.features, 1 << 24)).run_once(serving, PERIOD)
    assert list(config.features.iterdir())
    config.forget_tokens()
    assert list(config.features.iterdir()) == []
    assert not (folder / "00001" / RUN_DATA).exists()
    assert make(folder=folder).run_once(serving, PERIOD).version is not None
    assert sorted(each.name for each in folder.iterdir() if each.is_dir()) == ["00001", "00002"]


def test_what_is_erased_while_a_run_trains_is_neither_kept_again_nor_learnt_from(
    make: Make, serving: DrafterVersion, tmp_path: Path
) -> None:
    config = RetrainConfig(folder=tmp_path / "home")

    class Erased(LocalStore):
        def put(self, *arguments: Any) -> None:
            config.forget_tokens()
            super().put(*arguments)

    folder = config.runs / "target"
    with pytest.raises(TrainingError, match="what it learns from was erased"):
        make(folder=folder, features=Erased(config.features, 1 << 24)).run_once(serving, PERIOD)
    assert list(config.features.iterdir()) == []
    assert json.loads((folder / "00001" / "outcome.json").read_text())["result"] == "refused"


def test_what_is_erased_while_a_run_collects_is_not_kept_by_it(
    make: Make, serving: DrafterVersion, traffic: Traffic, tmp_path: Path
) -> None:
    config = RetrainConfig(folder=tmp_path / "home")

    def events() -> list[Any]:
        config.forget_tokens()
        return traffic.events

    with pytest.raises(TrainingError, match="what it learns from was erased"):
        make(folder=config.runs / "target", events=events).run_once(serving, PERIOD)
    assert not (config.runs / "target" / "00001" / RUN_DATA).exists()


def test_a_full_disk_ends_no_run_for_good(make: Make, serving: DrafterVersion) -> None:
    class Full(MemoryStore):
        def put(self, *arguments: Any) -> None:
            raise OSError(28, "No space left on device", "state.pt.partial")

    with pytest.raises(OSError, match="No space left"):
        make(features=Full(1 << 20)).run_once(serving, PERIOD)
    begun: list[tuple[Period, bool]] = []
    outcome = make().run_once(serving, Period(0.0, "another reason"), begins=lambda *run: begun.append(run))
    assert outcome.version is not None
    assert begun == [(PERIOD, True)]

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from redraft.engine.drafters.checkpoint import DrafterError
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, load, save
from redraft.engine.drafters.loading import content_id, version_of
from redraft.engine.drafters.loading import load as load_any
from redraft.retrain.config import TrainConfig, load_recipe
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import Stopped, TrainingError
from redraft.retrain.features_store import FeatureStore, LocalStore, MemoryStore
from redraft.retrain.finetune import FINETUNE, Candidate, finetune
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.replay import ModelReplay, walk
from redraft.retrain.traffic import TrafficData

from .conftest import CPU, PARADIGMS, make_sample, random_tokens

pytestmark = pytest.mark.unit

RECIPE = TrainConfig(
    steps=80, sequences=2, blocks=24, warmup=5, learning_rate=3e-3, eval_every=40, save_every=100, log_every=10
)
SHORT = RECIPE.model_copy(update={"steps": 12, "eval_every": 4})


def phrase(number: int) -> Sample:
    """A prompt of its own, and the answer that all give."""
    answer = random_tokens(12, 77) * 2
    return make_sample([*random_tokens(10, number), *answer], [(10, 34)], id=str(number), session=str(number))


@pytest.fixture
def serving(shape: DFlashConfig, tmp_path: Path) -> Path:
    save(tmp_path / "serving", shape, DFlashModel(shape, CPU, seed=1).state_dict(), card="")
    return tmp_path / "serving"


@pytest.fixture
def data(target: FrozenTarget) -> TrafficData:
    return TrafficData(
        target=target.identity,
        cut=1.0,
        train=tuple(phrase(number) for number in range(4)),
        replay=(phrase(4),),
        validation=(phrase(5), phrase(6)),
        gate=(),
        anchor=(),
        left_out={},
        begun=frozenset(),
        learnt=frozenset(),
    )


Run = Callable[..., Candidate]


@pytest.fixture
def run(data: TrafficData, target: FrozenTarget, serving: Path, tmp_path: Path) -> Run:
    def run(name: str, features: FeatureStore | None = None, **changes: Any) -> Candidate:
        arguments: dict[str, Any] = {"data": data, "serving": serving, "config": RECIPE, "commit": "c0ffee"} | changes
        return finetune(
            arguments.pop("data"),
            target=target,
            out=tmp_path / name,
            features=features or MemoryStore(1 << 24),
            **arguments,
        )

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder)[1])


def test_the_serving_drafter_learns_what_held_out_sessions_answer_too(
    run: Run, target: FrozenTarget, serving: Path, shape: DFlashConfig, data: TrafficData
) -> None:
    said: list[str] = []
    candidate = run("run", progress=lambda step, steps, text: said.append(text))
    assert candidate.before is not None
    assert candidate.after is not None
    assert candidate.before.tau is not None
    assert candidate.after.tau is not None
    assert candidate.after.tau > 1.5 * candidate.before.tau
    assert candidate.step > 0
    for folder, expected in ((serving, candidate.before), (candidate.folder, candidate.after)):
        drafting = ModelReplay(DFlashModel.load(folder, CPU), target)
        counts = [walk(sample, drafting(sample), 3).length for sample in data.validation]
        assert counts[0] + counts[1] == expected
    assert load(candidate.folder)[0] == shape == load(serving)[0], "block size and layers are the serving drafter's"
    assert candidate.provenance.initial == content_id(serving) != content_id(candidate.folder)
    assert candidate.provenance.config["block_size"] == shape.block_size != RECIPE.block_size
    lines = [json.loads(line) for line in (candidate.folder.parent / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_tau" in line] == [0, 40, 80]
    assert said[:5] == ["features"] * 5
    assert "loss" in said[-1]


@pytest.mark.parametrize("paradigm", ["eagle3 of 1 layer", "mtp", "injection only"])
def test_any_kind_of_drafter_is_fine_tuned_and_stays_what_it_is(
    run: Run, target: FrozenTarget, data: TrafficData, tmp_path: Path, paradigm: str
) -> None:
    """Shape, and what it can draft at all, are frozen: a retrained drafter takes the old one's place."""
    serving = tmp_path / "other"
    PARADIGMS[paradigm](target).save(serving, card="")
    candidate = run("run", serving=serving)
    assert candidate.before is not None
    assert candidate.after is not None
    assert (candidate.after.tau or 0) > 1.3 * (candidate.before.tau or 0)
    assert version_of(candidate.folder).kind == version_of(serving).kind
    old, new = load_any(serving), load_any(candidate.folder)
    assert new[0] == old[0]
    assert all(torch.equal(new[1][name], old[1][name]) for name in ("d2t", "t2d") if name in old[1])


def test_a_run_that_a_signal_stopped_goes_on_to_the_same_candidate(run: Run) -> None:
    whole = run("whole", config=SHORT)
    calls = 0

    def busy() -> bool:
        nonlocal calls
        calls += 1
        if calls == 25:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    with pytest.raises(Stopped, match="asked to stop"):
        run("broken", busy=busy, config=SHORT)
    resumed = run("broken", config=SHORT)
    assert (resumed.step, resumed.before, resumed.after) == (whole.step, whole.before, whole.after)
    one, other = weights(whole.folder), weights(resumed.folder)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    again = run("broken", config=SHORT)
    assert again == resumed, "a run that has ended only says so"


def test_training_looks_whether_serving_is_busy_between_all_its_passes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0

    def busy() -> bool:
        nonlocal looked
        looked += 1
        return False

    run("run", busy=busy, config=RECIPE.model_copy(update={"steps": 4, "pass_tokens": 1}))
    features, evaluated, trained = 5 + 2, 2 * 2, 4 * 2
    assert looked == features + evaluated + trained


def test_without_a_session_to_hold_out_the_last_step_is_the_candidate(run: Run, data: TrafficData) -> None:
    candidate = run("run", data=msgspec.structs.replace(data, validation=()), config=SHORT)
    assert (candidate.step, candidate.before, candidate.after) == (12, None, None)
    assert candidate.folder.name == "drafter"


def test_training_that_finds_nothing_better_gives_the_serving_weights_back(run: Run, serving: Path) -> None:
    candidate = run("run", config=RECIPE.model_copy(update={"learning_rate": 1e-9, "steps": 10}))
    assert candidate.step == 0
    assert candidate.before == candidate.after
    before, after = weights(serving), weights(candidate.folder)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_features_are_read_once_and_serve_the_next_run_from_disk(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: FrozenTarget
) -> None:
    first = run("first", LocalStore(tmp_path / "features", 1 << 24), config=SHORT)
    monkeypatch.setattr(type(target.target), "forward", None)
    second = run("second", LocalStore(tmp_path / "features", 1 << 24), config=SHORT)
    assert (first.step, first.after) == (second.step, second.after)


def test_what_a_run_may_not_go_on_from_is_named(
    run: Run, data: TrafficData, serving: Path, shape: DFlashConfig, tmp_path: Path
) -> None:
    run("run", config=SHORT)
    with pytest.raises(TrainingError, match="of a run with data"):
        run("run", config=SHORT, data=msgspec.structs.replace(data, replay=()))
    other = DFlashModel(shape, CPU, seed=9)
    save(tmp_path / "other", shape, other.state_dict(), card="")
    with pytest.raises(TrainingError, match="of a run with initial"):
        run("run", config=SHORT, serving=tmp_path / "other")
    with pytest.raises(TrainingError, match="data are of target another"):
        run("new", data=msgspec.structs.replace(data, target="another"))
    save(tmp_path / "foreign", replace(shape, target="0" * 64), other.state_dict(), card="")
    with pytest.raises(DrafterError, match="target"):
        run("new", serving=tmp_path / "foreign")
    with pytest.raises(TrainingError, match="nothing can be learnt"):
        run("new", data=msgspec.structs.replace(data, train=(), replay=()))


def test_the_shipped_recipe_is_sound() -> None:
    recipe = load_recipe(FINETUNE)
    assert recipe.steps % recipe.eval_every == 0

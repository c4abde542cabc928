"""Which drafter version should serve, which does and why: `redraft status`, `doctor` and `drafters ls` say it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from redraft.engine.drafters.loading import KINDS
from redraft.engine.protocol import EngineUnavailable
from redraft.engine.types import FLOOR, DrafterPointer, DrafterVersion, Health
from redraft.ops import shelf
from redraft.ops.config import RedraftConfig
from redraft.ops.shelf import TRAINED, out_of_step
from redraft.retrain.registry.pointers import FilePointerStore

pytestmark = pytest.mark.unit

TARGET = "7a" * 32
VERSION = DrafterVersion("dflash", "a" * 16)


@pytest.fixture
def config(tmp_path: Path) -> RedraftConfig:
    config = RedraftConfig.model_validate(
        {"engine": {"socket": str(tmp_path / "engine.sock")}, "retrain": {"folder": str(tmp_path / "retrain")}}
    )
    pointers = FilePointerStore(config.retrain.registry)
    assert asyncio.run(pointers.compare_and_set(0, DrafterPointer(target=TARGET, serving=VERSION, token=1)))
    return config


def answering(monkeypatch: pytest.MonkeyPatch, health: Health) -> None:
    async def ask(socket: Path) -> tuple[Health, str]:
        return health, TARGET

    monkeypatch.setattr(shelf, "_ask", ask)


def test_an_engine_that_serves_by_the_pointer_is_not_mentioned(
    config: RedraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, Health(ready=True, drafter=VERSION))
    assert out_of_step(config) == ""


def test_what_an_engine_says_of_a_version_that_it_could_not_take_is_passed_on(
    config: RedraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, Health(ready=True, drafter=FLOOR, detail="it is damaged"))
    assert out_of_step(config) == "it is damaged"


@pytest.mark.parametrize(
    ("drafter", "advice"),
    [("dflash", f"tell it: redraft drafters promote {VERSION.id}"), ("ngram", "engine.drafter is ngram, which comes")],
)
def test_an_engine_that_was_not_told_is_named_with_what_to_do(
    config: RedraftConfig, monkeypatch: pytest.MonkeyPatch, drafter: str, advice: str
) -> None:
    answering(monkeypatch, Health(ready=True, drafter=FLOOR))
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"drafter": drafter})})
    said = out_of_step(config)
    assert f"version {VERSION.id} should serve by the pointer, but the engine serves ngram builtin" in said
    assert advice in said


def test_an_engine_that_does_not_answer_is_for_others_to_report(
    config: RedraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(socket: Path) -> tuple[Health, str]:
        raise EngineUnavailable("loading")

    monkeypatch.setattr(shelf, "_ask", ask)
    assert out_of_step(config) == ""


def test_the_kinds_of_drafter_that_commands_name_are_those_that_engines_serve() -> None:
    assert tuple(KINDS) == TRAINED

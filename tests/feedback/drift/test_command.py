"""`redraft drift` says what the monitor found in the log, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from redraft.engine.types import DrafterVersion
from redraft.feedback.events import Event
from redraft.feedback.segments import SegmentLog
from redraft.ops.cli import app
from redraft.ops.commands import drift as command
from redraft.retrain.registry.record import VersionRecord
from redraft.retrain.registry.registry import open_registry

from .traffic import DFLASH, changed, reference, session, turn

pytestmark = pytest.mark.unit


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose log is empty and whose model is called ``target``."""
    monkeypatch.setattr(command, "resolve", lambda model: tmp_path)
    monkeypatch.setattr(command, "identity", lambda folder: "target")
    config = tmp_path / "config.yaml"
    config.write_text(f"feedback:\n  folder: {tmp_path}/feedback\nretrain:\n  folder: {tmp_path}/retrain\n")
    return config


def log_a_drop(config: Path) -> None:
    """300 sessions as they should be, then 200 at -20 %; a version of the registry expects the former."""
    rng = np.random.default_rng(0)
    stable = [session(rng)[0] for _ in range(1000)]
    sessions = [*stable[:300], *changed(rng, stable[:200], -0.2, copies=1)]
    events: list[Event] = [turn(counts, f"s{n}", time=1e9 + n) for n, counts in enumerate(sessions)]
    log = SegmentLog(config.parent / "feedback" / "events")
    log.append(events)
    log.close()
    record = VersionRecord(
        version=DFLASH, target="target", origin="imported", why="test", references=(reference(stable),)
    )
    open_registry(config.parent / "retrain" / "registry", "target").add(None, record, who="test")


def test_nothing_kept_is_said_in_words(deployment: Path) -> None:
    result = CliRunner().invoke(app, ["drift", "--config", str(deployment)])
    assert result.exit_code == 0
    assert "No answers with a drafter are kept yet." in result.output


def test_a_drop_is_shown_with_its_size_and_its_beginning(deployment: Path) -> None:
    log_a_drop(deployment)
    result = CliRunner().invoke(app, ["drift", "--config", str(deployment)])
    assert result.exit_code == 0, result.output
    assert "coder" in result.output
    assert "drifted" in result.output
    assert "drop in acme/coder, context ≤ 512, greedy: -" in result.output


def test_json_is_one_value_with_every_chart_and_signal(deployment: Path) -> None:
    log_a_drop(deployment)
    result = CliRunner().invoke(app, ["drift", "--json", "--config", str(deployment)])
    found = json.loads(result.output)
    (signal,) = [each for each in found["signals"] if each["stratum"]]
    assert signal["direction"] == "drop"
    assert signal["estimate"]["effect"] < -0.1
    assert found["status"]["strata"][0]["accept_length"]["verify_steps"] > 0
    assert DrafterVersion(**signal["drafter"]) == DFLASH
    assert msgspec.json.encode(found)


def test_watch_and_json_exclude_each_other(deployment: Path) -> None:
    result = CliRunner().invoke(app, ["drift", "--json", "--watch", "--config", str(deployment)])
    assert "exclude each other" in str(result.exception)

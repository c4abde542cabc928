from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.drafters.loading import content_id
from redraft.engine.embedded.core import EngineCore
from redraft.retrain.data.sample import Sample
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.judge import judge
from redraft.retrain.gate.report import Report
from redraft.retrain.gate.seen import TrainingRecord

from .conftest import cost_table

pytestmark = pytest.mark.unit

CONFIG = GateConfig(min_sessions=4, min_anchor_sessions=4, draws=1000, parity_sessions=2)

Judge = Callable[..., Report]


@pytest.fixture
def judged(
    sessions: list[Sample], untrained: Path, trained: Path, target: FrozenTarget, engine: Callable[[Path], EngineCore]
) -> Judge:
    def run(**changes: Any) -> Report:
        arguments: dict[str, Any] = {
            "gate": sessions[:4],
            "anchors": sessions[4:],
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

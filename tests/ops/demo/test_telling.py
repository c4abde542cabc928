"""What a person without a terminal hears of the demo, and what of it the picture and the folder are made of."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from redraft.engine.types import GREEDY, AcceptLength
from redraft.feedback.contexts import TurnContext
from redraft.ops.commands.demo import display
from redraft.ops.demo import finale
from redraft.ops.demo.story import Phase
from redraft.retrain.data.sample import Sample
from redraft.retrain.replay import AcceptCounts, Replayed

pytestmark = pytest.mark.unit


def test_without_a_terminal_each_part_is_one_whole_line_and_counts_are_none() -> None:
    heard = io.StringIO()
    part = f"1. {'a long sentence ' * 20}[of 7]"
    with display(Console(file=heard)) as show:
        show.tell(part)
        for step in range(9):
            show.tick("before", step, 9, 2.5)
            show.progress(step, 9, "gate: anchors")
    assert heard.getvalue() == f"{part}\n"


def test_the_gates_page_and_plots_outlive_the_deployment(tmp_path: Path) -> None:
    gate = tmp_path / "runs" / "target" / "00001" / "gate"
    gate.mkdir(parents=True)
    for name in ("report.md", "gains.png"):
        (gate / name).write_text(name)
    config = SimpleNamespace(retrain=SimpleNamespace(runs=tmp_path / "runs"))
    story = SimpleNamespace(served=SimpleNamespace(config=config))
    finale.keep_report(story, tmp_path / "out")  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gains.png", "report.md"]


def test_the_old_drafters_replays_are_under_the_names_that_the_sessions_were_served_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = {"old": 6, "new": 3}

    def replay(samples: Sequence[Sample], drafter: str, lengths: Sequence[int]) -> Iterator[Replayed]:
        for sample in samples:
            yield Replayed(sample, {length: AcceptCounts(12, steps[drafter], (), ()) for length in lengths})

    context = TurnContext(
        tenant="default", session="x", time=0.0, target="t", token_ids=(1, 2, 3), prompt_tokens=1, sampling=GREEDY
    )
    monkeypatch.setattr(finale, "answers_of", lambda story, phase: {"a": {1: context, 3: context}, "b": {1: context}})
    monkeypatch.setattr(finale, "drafting_of", lambda folder, target: folder.name)
    monkeypatch.setattr(finale, "replay", replay)
    phases = [
        Phase(name="drift", agents=1, started=0.0, sessions={"0000:a": "a"}),
        Phase(name="recovered", agents=1, started=1.0, sessions={"0001:a": "a", "0002:b": "b"}),
    ]
    served = SimpleNamespace(config=SimpleNamespace(engine=SimpleNamespace(block_size=8)))
    story = SimpleNamespace(phases=phases, served=served)
    found = finale.judged(story, Path("old"), Path("new"), None, 9, lambda *_: None)  # type: ignore[arg-type]
    assert found.old_by_session == {"0001:a": AcceptLength(24, 12), "0002:b": AcceptLength(12, 6)}
    assert (found.sessions, found.old, found.new) == (2, AcceptLength(36, 18), AcceptLength(36, 9))

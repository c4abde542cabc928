"""What a person without a terminal hears of the demo, and what is kept of its gate."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from redraft.ops.commands.demo import display
from redraft.ops.demo.finale import keep_report

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
    retrain = SimpleNamespace(runs=tmp_path / "runs")
    keep_report(SimpleNamespace(served=SimpleNamespace(config=SimpleNamespace(retrain=retrain))), tmp_path / "out")  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gains.png", "report.md"]

"""What the demo says of its run, in words and in a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from redraft.engine.types import AcceptLength
from redraft.ops.demo.plot import draw
from redraft.ops.demo.results import Judged, PhaseRow, Refused, Result, SessionRow
from redraft.ops.demo.story import Run
from redraft.ops.demo.summary import sentences

pytestmark = pytest.mark.unit


def phase(name: str, committed: int, verify_steps: int, started: float) -> PhaseRow:
    return PhaseRow(
        name=name,
        started=started,
        ended=started + 100,
        sessions=20,
        requests=40,
        failed=0,
        committed=committed,
        verify_steps=verify_steps,
        tau=committed / verify_steps,
        tpot_p50_ms=10.0,
        tpot_p95_ms=20.0,
    )


def rows(name: str, started: float, tau: int) -> list[SessionRow]:
    return [
        SessionRow(
            phase=name,
            session=f"{name}{number}",
            time=started + 5 * number,
            committed=10 * tau + number % 3 * 4,
            verify_steps=10,
            tpot_ms=40.0 / tau,
            drafter="old",
        )
        for number in range(20)
    ]


@pytest.fixture
def result() -> Result:
    return Result(
        fast=True,
        seconds=400,
        rewritten_at=100,
        detected_at=150,
        swapped_at=300,
        drift={"effect": -0.45, "low": -0.5, "high": -0.4, "sessions": 21, "drafter": "old"},
        run=Run(outcome="promoted", seconds=95, said=""),
        old="old",
        new="new",
        phases=[
            phase("before", 480, 100, 0),
            phase("drift", 120, 50, 100),
            phase("drift", 120, 50, 150),
            phase("training", 240, 100, 200),
            phase("recovered", 400, 100, 300),
        ],
        judged=Judged(sessions=20, old=AcceptLength(240, 100), new=AcceptLength(240, 60)),
        poisoned=Refused(poison="a slow one", outcome="refused", rule="slower", reason="it is slow"),
        lossless_checked=10,
        lossless_violations=0,
        failed_requests=0,
        sessions=[*rows("before", 0, 5), *rows("drift", 100, 2), *rows("training", 200, 2), *rows("recovered", 300, 4)],
    )


def test_the_summary_tells_every_part_with_its_numbers(result: Result) -> None:
    text = " ".join(sentences(result))
    for words in (
        "4.80 (480/100)",
        "2.40 (240/100)",
        "21 sessions, 50 seconds after the rewrite",
        "-45%",
        "1.6 minutes",
        "verdict: promoted",
        "4.00 (240/60)",
        "+67%, for the very same answers",
        "refused (slower): it is slow",
        "200 requests, 0 failed",
    ):
        assert words in text


def test_a_refused_candidate_is_told_without_a_recovery(result: Result) -> None:
    refused = replace(
        result,
        run=Run(outcome="refused", seconds=95, said=""),
        judged=None,
        poisoned=None,
        new=None,
        swapped_at=None,
    )
    text = " ".join(sentences(refused))
    assert "verdict: refused" in text
    assert "the very same answers" not in text


def test_the_picture_is_drawn(result: Result, tmp_path: Path) -> None:
    draw(result, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")

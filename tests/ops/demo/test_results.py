"""What the demo says of its run, in words and in a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from redraft.engine.types import AcceptLength
from redraft.ops.demo.plot import WINDOW, around, draw, phases_of
from redraft.ops.demo.results import Judged, PhaseRow, Refused, Result, SessionRow
from redraft.ops.demo.story import Phase, Run
from redraft.ops.demo.summary import sentences
from redraft.ops.demo.traffic import TurnResult

pytestmark = pytest.mark.unit


def phase(name: str, committed: int, verify_steps: int, started: float) -> PhaseRow:
    return PhaseRow(
        name=name,
        agents=1,
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
            time=started + 5 * number + 4,
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
        began=0,
        seconds=400,
        rewritten_at=100,
        detected_at=150,
        gate_at=250,
        swapped_at=300,
        drift={"effect": -0.45, "low": -0.5, "high": -0.4, "sessions": 21, "drafter": "old"},
        run=Run(outcome="promoted", seconds=95, said=""),
        old="old",
        new="new",
        phases=[
            phase("before", 480, 100, 0),
            phase("drift", 240, 100, 100),
            phase("training", 240, 100, 200),
            phase("recovered", 400, 100, 300),
        ],
        judged=Judged(
            sessions=20,
            old=AcceptLength(240, 100),
            new=AcceptLength(240, 60),
            old_by_session={f"recovered{number}": AcceptLength(12, 5) for number in range(20)},
        ),
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
        "160 requests, 0 failed",
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


def test_the_picture_is_drawn_with_a_recovery_and_without(result: Result, tmp_path: Path) -> None:
    refused = replace(result, judged=None, new=None, swapped_at=None, sessions=result.sessions[:60])
    for name, drawn in (("promoted", result), ("refused", refused)):
        draw(drawn, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_phase_begins_in_the_picture_where_its_first_session_is(result: Result) -> None:
    """Session times are of last answers, the story's from its beginning."""
    later = replace(
        result,
        began=1e9,
        detected_at=152,
        phases=[replace(row, started=row.started + 1e9) for row in result.phases],
        sessions=[replace(row, time=row.time + 1e9) for row in result.sessions],
    )
    assert [place for place, _ in phases_of(later)] == [-0.5, 19.5, 29.5, 39.5, 49.5, 59.5]


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_no_point_of_a_line_pools_fewer_sessions_than_another(count: int) -> None:
    pooled = [list(range(count))[around(index, count)] for index in range(count)]
    assert {len(each) for each in pooled} == {min(WINDOW, count)}
    assert all(index in each for index, each in enumerate(pooled))


def test_the_stretches_of_one_name_are_one_phase() -> None:
    """The times of a summary are of all the drift that it speaks of."""
    turns = [TurnResult(session="s", turn=1, started=0, tpot=tpot) for tpot in (0.01, 0.02, 0.03, 0.04)]
    first = Phase(name="drift", agents=2, started=1, ended=2, sessions={"a": "a"}, turns=turns[:2])
    both = first + Phase(name="drift", agents=2, started=2, ended=3, sessions={"b": "b"}, turns=turns[2:])
    assert (both.started, both.ended, list(both.sessions)) == (1, 3, ["a", "b"])
    assert both.tpot() == pytest.approx((25.0, 38.5))

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from redraft.engine.types import DrafterVersion
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.measure import Answer
from redraft.retrain.gate.parity import Parity
from redraft.retrain.gate.report import ANCHORS, LOOPING, NEW_TRAFFIC, Leak, Report, SessionRow, compare, session_rows
from redraft.retrain.gate.verdict import Evidence, decide
from redraft.retrain.gate.writing import GAINS, HAZARDS, PAGE, markdown, read, write
from redraft.retrain.replay import AcceptCounts

from ..conftest import make_sample

pytestmark = pytest.mark.unit

CONFIG = GateConfig(draws=2000)


def counted(generator: np.random.Generator, verify_steps: int, hazard: float) -> AcceptCounts:
    """Blocks of seven drafted tokens, each accepted with probability ``hazard``."""
    reached, accepted, left = [], [], verify_steps
    for _ in range(7):
        reached.append(left)
        left = int(generator.binomial(left, hazard))
        accepted.append(left)
    return AcceptCounts(verify_steps + sum(accepted), verify_steps, tuple(reached), tuple(accepted))


def answers(kind: str, old: float, new: float, sessions: int = 24, **changes: Any) -> list[SessionRow]:
    generator = np.random.default_rng(len(kind))
    made = []
    for index in range(sessions):
        tokens = int(generator.integers(100, 600))
        under_old, under_new = (
            counted(generator, round(tokens * (1 - hazard) * generator.uniform(0.9, 1.1)), hazard)
            for hazard in (old, new)
        )
        sample = make_sample(range(9), [(3, 9)], session=f"{kind} {index}", source=("bfcl", "retail")[index % 2])
        costs = under_old.verify_steps * 30.0, under_new.verify_steps * 30.0
        made.append(Answer(sample, changes.get("looping", False), under_old, under_new, *costs))
    return session_rows(kind, made)


def report(old: float = 0.5, new: float = 0.6, anchors: float = 0.5) -> Report:
    rows = [
        *answers(NEW_TRAFFIC, old, new),
        *answers(ANCHORS, 0.5, anchors),
        *answers(NEW_TRAFFIC, 0.8, 0.7, 6, looping=True),
    ]
    plain = [row for row in rows if not row.looping]
    parts = {
        NEW_TRAFFIC: [row for row in plain if row.kind == NEW_TRAFFIC],
        ANCHORS: [row for row in plain if row.kind == ANCHORS],
        LOOPING: [row for row in rows if row.looping],
    }
    compared = {name: compare(name, part, level=0.975, draws=2000, seed=0) for name, part in parts.items()}
    traffic, kept = compared[NEW_TRAFFIC], compared[ANCHORS]
    assert traffic
    assert kept
    evidence = Evidence(
        sessions=traffic.sessions,
        anchor_sessions=kept.sessions,
        gain=traffic.gain,
        tau_gain=traffic.tau_gain,
        anchor_gain=kept.gain,
    )
    return Report(
        verdict=decide(evidence, CONFIG),
        time="2026-01-01T00:00:00+00:00",
        target="t" * 64,
        old=DrafterVersion("dflash", "0" * 16),
        new=DrafterVersion("dflash", "1" * 16),
        block_length=7,
        look=1,
        level=0.975,
        config=CONFIG.model_dump(),
        gate_hash="g" * 64,
        anchor_hash="a" * 64,
        costs_hash="c" * 64,
        unusable=0,
        leak=Leak(),
        parity=Parity(
            answers=4,
            reproduced=4,
            violations=0,
            committed=300,
            engine_steps=100,
            replay_steps=101,
            tolerance=0.05,
        ),
        new_traffic=traffic,
        anchors=kept,
        looping=compared[LOOPING],
        sessions=tuple(rows),
    )


def test_the_page_begins_with_verdict_and_rule() -> None:
    assert markdown(report()).startswith("# Accepted: 1111111111111111 against 0000000000000000\n")
    lost = markdown(report(anchors=0.35)).splitlines()
    assert lost[0] == "# Refused, by rule `anchors_lost`: 1111111111111111 against 0000000000000000"
    assert lost[2].startswith("Goodput on anchors changes by \u2212")


def test_an_open_verdict_says_on_the_page_what_would_close_it() -> None:
    found = report(new=0.505)
    assert found.rule == "undecided"
    assert f"About {found.verdict.more_sessions} more sessions of new traffic would decide" in markdown(found)


def test_looping_answers_are_in_their_own_row_and_in_no_other() -> None:
    found = report()
    assert found.looping is not None
    assert found.new_traffic is not None
    everything = sum(row.old.committed for row in found.sessions if row.kind == NEW_TRAFFIC)
    assert found.new_traffic.old.committed + found.looping.old.committed == everything
    assert any(line.startswith("| looping | 6 |") for line in markdown(found).splitlines())


def test_numerators_and_denominators_stand_beside_every_accept_length() -> None:
    found = report()
    assert found.new_traffic is not None
    side = found.new_traffic.new
    assert f"{side.tau:.2f} ({side.committed}/{side.verify_steps})" in markdown(found)


def test_a_report_is_read_back_as_it_was_written_with_its_plots(tmp_path: Path) -> None:
    found = report()
    write(found, tmp_path)
    assert read(tmp_path) == found
    assert (tmp_path / PAGE).read_text() == markdown(found)
    for plot in (HAZARDS, GAINS):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
        assert plot in markdown(found)


def test_a_leaked_candidate_has_a_page_without_numbers(tmp_path: Path) -> None:
    verdict = decide(Evidence(leaked="training saw 2 of the 40 sessions"), CONFIG)
    write(msgspec.structs.replace(report(), verdict=verdict, new_traffic=None, anchors=None, looping=None), tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert page.startswith("# Refused, by rule `leaked`")
    assert "accept length" not in page.lower()
    assert not (tmp_path / HAZARDS).exists()


def test_sessions_without_a_verify_step_are_not_counted() -> None:
    none = AcceptCounts(0, 0, (0,) * 7, (0,) * 7)
    empty = session_rows(NEW_TRAFFIC, [Answer(make_sample(range(4), [(3, 4)]), False, none, none, 0.0, 0.0)])
    assert compare(NEW_TRAFFIC, empty, level=0.975, draws=1000, seed=0) is None
    rows = answers(NEW_TRAFFIC, 0.5, 0.6)
    assert compare("", [*rows, *empty], level=0.9, draws=1000, seed=0) == compare(
        "", rows, level=0.9, draws=1000, seed=0
    )

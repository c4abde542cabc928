"""A gate's verdict enters the history of the version that it judged, with the numbers it rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.engine.types import FLOOR, AcceptLength, DrafterVersion
from redraft.retrain.gate.report import Comparison, Leak, Report, Side
from redraft.retrain.gate.statistics import Bounds
from redraft.retrain.gate.verdict import Outcome, Rule, Verdict
from redraft.retrain.registry.judged import record_verdict
from redraft.retrain.registry.registry import Registry

from .conftest import TARGET, Drafters, add

pytestmark = pytest.mark.unit


def side(committed: int, verify_steps: int) -> Side:
    tau = committed / verify_steps
    return Side(committed=committed, verify_steps=verify_steps, ms=1.0, tau=tau, goodput=1.0, reached=(), accepted=())


def report(version: DrafterVersion, outcome: Outcome, rule: Rule | None, new_traffic: Comparison | None) -> Report:
    return Report(
        verdict=Verdict(outcome, rule, (rule,) if rule else (), "in words"),
        time="2030-01-01T00:00:00+00:00",
        target=TARGET,
        old=FLOOR,
        new=version,
        block_length=7,
        look=1,
        level=0.95,
        config={},
        gate_hash="",
        anchor_hash="",
        costs_hash="",
        unusable=0,
        leak=Leak(),
        new_traffic=new_traffic,
    )


@pytest.mark.parametrize(
    ("outcome", "rule", "why"),
    [
        ("accepted", None, "in words"),
        ("refused", "slower", "slower: in words"),
        ("inconclusive", "thin", "thin: in words"),
    ],
)
def test_an_outcome_becomes_a_state_with_its_reason_and_numbers(
    outcome: Outcome, rule: Rule | None, why: str, registry: Registry, drafters: Drafters
) -> None:
    version = add(registry, drafters(0))
    found = Comparison(
        name="new traffic",
        sessions=30,
        answers=60,
        old=side(200, 100),
        new=side(200, 80),
        gain=Bounds(0.2, 0.1, 0.3, 0.95, 0.05, 30),
        tau_gain=None,
    )
    entered = record_verdict(registry, report(version, outcome, rule, found), Path("gate.json"))
    last = registry.get(version).history[-1]
    assert (entered.state, last.state, last.who, last.why) == (outcome, outcome, "gate", why)
    assert last.gate and (last.gate.report, last.gate.accept_length) == ("gate.json", AcceptLength(200, 80))
    assert last.gate.numbers == {
        "new traffic sessions": 30,
        "new traffic old tau": 2.0,
        "new traffic gain": 0.2,
        "new traffic gain at least": 0.1,
        "new traffic gain at most": 0.3,
    }


def test_a_report_that_measured_nothing_is_recorded_too(registry: Registry, drafters: Drafters) -> None:
    version = add(registry, drafters(0))
    entered = record_verdict(registry, report(version, "refused", "leaked", None), Path("gate.json"))
    assert entered.state == "refused"
    assert entered.gate and entered.gate.accept_length.tau is None

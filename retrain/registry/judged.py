"""What a gate's report becomes in the history of the version that it judged."""

from __future__ import annotations

from pathlib import Path

from redraft.engine.types import AcceptLength
from redraft.retrain.gate.report import Comparison, Report
from redraft.retrain.registry.record import Entered, GateResult
from redraft.retrain.registry.registry import Registry


def record_verdict(registry: Registry, report: Report, file: Path, *, who: str = "gate") -> Entered:
    """Enter the verdict of ``report``, which is kept in ``file``; the accept length is that on new traffic."""
    numbers: dict[str, float] = {}
    for name, found in (("new traffic", report.new_traffic), ("anchors", report.anchors)):
        if found:
            numbers |= {f"{name} {key}": value for key, value in _numbers(found).items()}
    new = report.new_traffic.new if report.new_traffic else None
    result = GateResult(
        report=str(file),
        accept_length=AcceptLength(new.committed, new.verify_steps) if new else AcceptLength(),
        numbers=numbers,
        references=report.references,
    )
    why = f"{report.rule}: {report.verdict.reason}" if report.rule else report.verdict.reason
    return registry.decide(report.new, report.outcome, who=who, why=why, gate=result)


def _numbers(found: Comparison) -> dict[str, float]:
    numbers: dict[str, float] = {"sessions": found.sessions}
    if found.old.tau is not None:
        numbers["old tau"] = found.old.tau
    if found.gain:
        numbers |= {"gain": found.gain.estimate, "gain at least": found.gain.lower, "gain at most": found.gain.upper}
    return numbers

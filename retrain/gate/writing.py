"""The gate's report on disk: JSON for machines, a page that a person reads in a minute, and its plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from redraft.retrain.gate.report import Comparison, Report, Side
from redraft.retrain.gate.statistics import Bounds
from redraft.retrain.gate.verdict import percent

REPORT, PAGE, HAZARDS, GAINS = "report.json", "report.md", "hazards.png", "gains.png"


def write(report: Report, folder: Path) -> None:
    """Write all of it into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(markdown(report), encoding="utf-8")
    if report.new_traffic is not None:
        from redraft.retrain.gate.plots import plot_gains, plot_hazards

        plot_hazards(report, folder / HAZARDS)
        plot_gains(report, folder / GAINS)


def read(folder: Path) -> Report:
    """The report that `write` left there."""
    return msgspec.json.decode((folder / REPORT).read_bytes(), type=Report)


def markdown(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    verdict = report.verdict
    by = f", by rule `{verdict.rule}`" if verdict.rule else ""
    yield f"# {verdict.outcome.capitalize()}{by}: {report.new.id} against {report.old.id}"
    yield ""
    yield f"{verdict.reason[0].upper()}{verdict.reason[1:]}."
    if len(verdict.rules) > 1:
        yield f"Also broken: {', '.join(f'`{rule}`' for rule in verdict.rules[1:])}."
    for more, kind in ((verdict.more_sessions, "sessions of new traffic"), (verdict.more_anchor_sessions, "anchors")):
        if more:
            yield f"About {more} more {kind} would decide, if it goes on like this."
    if report.new_traffic is None:
        yield from _small_print(report)
        return
    parts = [each for each in (report.new_traffic, report.anchors, report.looping) if each is not None]
    yield ""
    yield f"| | sessions | accept length old | new | goodput old | new | change | {report.level:.1%} sure |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    yield from map(_row, [*parts, *report.groups])
    yield ""
    yield (
        "Accept length is committed tokens over verify steps, goodput committed tokens a second by the engine's cost "
        f"table at {_count(int(report.config['sequences']), 'request')} in a pass and block length "
        f"{report.block_length}. Looping answers are in their own row and count for nothing."
    )
    yield ""
    yield "| accepted at position | " + " | ".join(str(k) for k in range(1, report.block_length + 1)) + " |"
    yield "| --- |" + " ---: |" * report.block_length
    for part in parts[:2]:
        yield from (_hazards(f"{part.name}, {name}", side) for name, side in (("old", part.old), ("new", part.new)))
    yield ""
    yield f"![Accepted share by position]({HAZARDS})"
    yield f"![What the changes may be]({GAINS})"
    yield from _small_print(report)


def _small_print(report: Report) -> Iterator[str]:
    yield ""
    if report.draft_cost is not None:
        cost = report.draft_cost
        if cost.old_ms is None or cost.ratio is None:
            yield f"- A draft took {cost.new_ms:.2f} ms with the new drafter, at {cost.context} tokens of context."
        else:
            shape = "the same shape" if cost.same_shape else "another shape"
            yield (
                f"- A draft took {cost.old_ms:.2f} ms with the old and {cost.new_ms:.2f} ms with the new drafter, of "
                f"{shape}, at {cost.context} tokens of context: its cost is reckoned {cost.ratio:.2f} times the old's."
            )
    if report.parity is not None:
        parity = report.parity
        yield (
            f"- The engine gave {parity.reproduced} of {parity.answers} recorded answers again, in "
            f"{parity.engine_steps} verify steps where the replay says {parity.replay_steps}; "
            f"{parity.violations} changed with the candidate."
        )
    if report.leak.set_aside:
        yield f"- Set aside, for training saw their answers under other names: {len(report.leak.set_aside)} sessions."
    if report.unusable:
        yield f"- Left out as sampled or too long: {_count(report.unusable, 'answer')}."
    yield (
        f"- Look {report.look} of this series, so each bound holds with {report.level:.2%}. "
        f"Bootstrap of sessions, {report.config['draws']} draws, seed {report.config['seed']}."
    )
    yield (
        f"- Target {report.target[:12]}, sessions {report.gate_hash[:12]}, anchors {report.anchor_hash[:12]}, "
        f"costs {report.costs_hash[:12]}, {report.time}."
    )


def _row(part: Comparison) -> str:
    cells = [
        part.name,
        str(part.sessions),
        _tau(part.old),
        _tau(part.new),
        _number(part.old.goodput),
        _number(part.new.goodput),
        percent(part.gain.estimate) if part.gain else "",
        _interval(part.gain),
    ]
    return f"| {' | '.join(cells)} |"


def _interval(found: Bounds | None) -> str:
    return f"{percent(found.lower)} to {percent(found.upper)}" if found else "too few"


def _tau(side: Side) -> str:
    return "" if side.tau is None else f"{side.tau:.2f} ({side.committed}/{side.verify_steps})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _hazards(name: str, side: Side) -> str:
    return f"| {name} | {_cells(side.hazard)} |"


def _cells(hazard: Sequence[float | None]) -> str:
    return " | ".join("" if h is None else f"{h:.2f}" for h in hazard)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")

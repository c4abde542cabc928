"""Plots of a report: accepted share by position, and what the changes in goodput may be."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from redraft.retrain.gate.report import ANCHORS, NEW_TRAFFIC, Comparison, Report, Side, paired_sums
from redraft.retrain.gate.statistics import distribution
from redraft.retrain.gate.verdict import percent

OLD, NEW, LIMIT, GREY = "#8a8f98", "#1f6feb", "#c62828", "#555b66"
DPI = 150


def plot_hazards(report: Report, file: Path) -> None:
    """Share accepted at each position among verify steps that reached it, with 95 % binomial error bars."""
    parts = [part for part in (report.new_traffic, report.anchors) if part is not None]
    figure, axes = _panels(len(parts), (4.6, 3.6))
    for axis, part in zip(axes, parts, strict=True):
        _curve(axis, part.old, OLD, f"old, tau {part.old.tau:.2f}", -0.04)
        _curve(axis, part.new, NEW, f"new, tau {part.new.tau:.2f}", 0.04)
        axis.set_title(f"{part.name.capitalize()}: {part.sessions} sessions", loc="left", fontsize=11)
        axis.set_xlabel("position in the block")
        axis.set_xticks(range(1, report.block_length + 1))
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        axis.legend(frameon=False, loc="lower right")
    axes[0].set_ylabel("accepted, of those that got there")
    _save(figure, file)


def plot_gains(report: Report, file: Path) -> None:
    """The bootstrap distribution of each change in goodput, with its bounds and what it is held to."""
    tests = [
        (part, limit)
        for part, limit in ((report.new_traffic, 0.0), (report.anchors, -float(report.config["anchor_margin"])))
        if part is not None and part.gain is not None
    ]
    figure, axes = _panels(max(len(tests), 1), (4.6, 3.3))
    for axis, (part, limit) in zip(axes, tests, strict=False):
        _distribution(axis, report, part, limit)
    _save(figure, file)


def _curve(axis: Axes, side: Side, colour: str, label: str, shift: float) -> None:
    at = [k for k, reached in enumerate(side.reached) if reached]
    shares = np.array([side.accepted[k] / side.reached[k] for k in at])
    errors = np.array([_wilson(side.accepted[k], side.reached[k]) for k in at]).reshape(-1, 2).T
    axis.errorbar(
        [k + 1 + shift for k in at],
        shares,
        yerr=np.abs(errors - shares),
        color=colour,
        label=label,
        marker="o",
        markersize=4,
        linewidth=1.8,
        elinewidth=1,
        capsize=2,
    )


def _distribution(axis: Axes, report: Report, part: Comparison, limit: float) -> None:
    assert part.gain is not None
    gain = part.gain
    kind = ANCHORS if part is report.anchors else NEW_TRAFFIC
    rows = [row for row in report.sessions if row.kind == kind and not row.looping and row.old.verify_steps]
    times, _ = paired_sums(rows)
    drawn = distribution(times, draws=int(report.config["draws"]), seed=int(report.config["seed"])) * 100
    left, right = np.quantile(drawn, (0.001, 0.999))
    axis.hist(drawn, bins=60, range=(left, right), color=NEW, alpha=0.3)
    axis.axvline(gain.estimate * 100, color=NEW, ymax=0.68, linewidth=1.8, label=f"estimate {percent(gain.estimate)}")
    axis.axvline(
        gain.lower * 100, color=NEW, ymax=0.68, linewidth=1.2, linestyle="--", label=f"at least {percent(gain.lower)}"
    )
    axis.axvline(
        gain.upper * 100, color=NEW, ymax=0.68, linewidth=1.2, linestyle=":", label=f"at most {percent(gain.upper)}"
    )
    axis.axvline(
        limit * 100, color=LIMIT, ymax=0.68, linewidth=1.8, label="no gain" if not limit else f"margin {percent(limit)}"
    )
    axis.set_title(f"{part.name.capitalize()}: change in goodput", loc="left", fontsize=11)
    axis.set_xlabel(f"%, each bound {report.level:.1%} sure")
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.5)
    axis.legend(frameon=False, loc="upper center", ncols=2, fontsize=8.5)


def _wilson(accepted: int, reached: int) -> tuple[float, float]:
    """Wilson's 95 % score interval."""
    z = 1.96
    share = accepted / reached
    middle = (share + z * z / (2 * reached)) / (1 + z * z / reached)
    half = z * sqrt(share * (1 - share) / reached + z * z / (4 * reached * reached)) / (1 + z * z / reached)
    return middle - half, middle + half


def _panels(count: int, size: tuple[float, float]) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(size[0] * count, size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=GREY)
        axis.grid(axis="y" if size[1] > 3.5 else "x", color="#e6e8eb", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, dpi=DPI)

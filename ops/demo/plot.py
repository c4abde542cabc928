"""The story as one picture: accept length and time a token, session by session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from redraft.ops.demo.results import Result, SessionRow, pooled

WINDOW = 10
"""Sessions pooled for a line's point."""

COLOURS = {"before": "#4c72b0", "drift": "#c44e52", "training": "#dd8452", "recovered": "#55a868"}
LABELS = {
    "before": "before the rewrite",
    "drift": "after it, old drafter",
    "training": "training beside serving",
    "recovered": "new drafter, unseen requests",
}


def draw(result: Result, file: Path) -> None:
    """Write a PNG; accept lengths are pooled over the last ten sessions of the same drafter."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = result.sessions
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    for phase in dict.fromkeys(row.phase for row in rows):
        at = [index for index, row in enumerate(rows) if row.phase == phase]
        colour = COLOURS[phase]
        taus = [pooled([rows[index]]).tau for index in at]
        above.scatter(at, [tau or float("nan") for tau in taus], s=11, color=colour, alpha=0.3, linewidths=0)
        above.plot(at, [_tau(rows, index) for index in at], color=colour, linewidth=2.4, label=LABELS[phase])
        below.plot(at, [_tpot(rows, index) for index in at], color=colour, linewidth=2.0)
        for axes in (above, below):
            axes.axvspan(at[0] - 0.5, at[-1] + 0.5, color=colour, alpha=0.06, linewidth=0)
    for place, text in _events(result):
        for axes in (above, below):
            axes.axvline(place, color="0.3", linewidth=1, linestyle=(0, (4, 3)))
        above.annotate(
            text, (place, 1.0), (4, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
            va="top", ha="left", fontsize=9, color="0.2", rotation=90,
        )  # fmt: skip
    above.set_ylabel("accept length\n(tokens a verify step)")
    above.set_ylim(bottom=1.0, top=1.25 * max(_tau(rows, index) for index in range(len(rows))))
    below.set_ylabel("ms a token")
    below.set_ylim(bottom=0)
    below.set_xlabel("sessions, in the order they were served")
    above.set_title("An agent is rewritten: its drafter falls behind, is retrained on the traffic, and is swapped in")
    figure.legend(loc="outside lower center", ncols=len(LABELS), frameon=False, fontsize=9)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(x=0.01)
    figure.savefig(file, dpi=130)


def _tau(rows: Sequence[SessionRow], index: int) -> float:
    recent = [row for row in rows[max(0, index - WINDOW + 1) : index + 1] if row.phase == rows[index].phase]
    return pooled(recent).tau or float("nan")


def _tpot(rows: Sequence[SessionRow], index: int) -> float:
    recent = [row for row in rows[max(0, index - WINDOW + 1) : index + 1] if row.phase == rows[index].phase]
    times = [row.tpot_ms for row in recent if row.tpot_ms is not None]
    return median(times) if times else float("nan")


def _events(result: Result) -> list[tuple[float, str]]:
    """Places between sessions, and what happened there."""
    rows = result.sessions
    begun = rows[0].time if rows else 0.0
    wanted = (
        (result.rewritten_at, "agent rewritten"),
        (result.detected_at, "drift detected"),
        (result.swapped_at, "new drafter swapped in"),
    )
    return [(sum(row.time - begun < at for row in rows) - 0.5, text) for at, text in wanted if at is not None]

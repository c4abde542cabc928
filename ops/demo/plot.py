"""The story as one picture: accept length and time a token, session by session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from redraft.engine.types import AcceptLength
from redraft.ops.demo.results import Result, pooled

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.typing import LineStyleType

WINDOW = 20
"""Sessions pooled for a line's point: those around it, of the same drafter and traffic."""

OLD, NEW = "#d55e00", "#0072b2"
"""Told apart by the colour-blind too (Okabe and Ito's)."""

DASHED = (0, (3, 1.5))

AFTER = "new drafter serves,\nunseen scenarios"


def draw(result: Result, file: Path) -> None:
    """Write a PNG; after the swap the old drafter's accept lengths on the same answers are drawn beside the new's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    phases = list(phases_of(result))
    cuts = [-0.5, *(start for start, name in phases if name == AFTER), len(result.sessions) - 0.5]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        2, len(cuts) - 1, sharex="col", sharey="row", height_ratios=(2.4, 1), width_ratios=(4, 1)[: len(cuts) - 1],
        squeeze=False,
    )  # fmt: skip
    for (above, below), (start, end) in zip(grid.T, pairwise(cuts), strict=True):
        _draw_accept_lengths(result, above)
        _draw_times(result, below)
        _mark_phases([*phases, (cuts[-1], "")], above, below, (start, end))
        above.set_xlim(start, end)
        above.xaxis.get_major_locator().set_params(integer=True)
    above, below = grid[:, 0]
    above.set_ylabel("accept length\n(tokens a verify step, more is better)")
    above.set_ylim(bottom=1.0)
    below.set_ylabel("ms a token\n(less is better)")
    below.set_ylim(bottom=0)
    below.set_xlabel(f"sessions in the order they were served (a dot is one of them, a line pools {WINDOW})")
    figure.suptitle("An agent is rewritten, its drafter falls behind, and is retrained on that very traffic")
    figure.legend(handles=list(_legend(result)), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=130)


def _draw_accept_lengths(result: Result, axes: Axes) -> None:
    rows = result.sessions
    for phases, colour in ((("before",), OLD), (("drift", "training"), OLD), (("recovered",), NEW)):
        _line(axes, {at: pooled([row]) for at, row in enumerate(rows) if row.phase in phases}, colour, "-")
    replayed = result.judged.old_by_session if result.judged else {}
    _line(axes, {at: replayed[row.session] for at, row in enumerate(rows) if row.session in replayed}, OLD, DASHED)


def _line(axes: Axes, found: Mapping[int, AcceptLength], colour: str, style: LineStyleType) -> None:
    """A dot a session at its place, hollow where the line is not solid, and the line that pools them."""
    places, lengths = list(found), list(found.values())
    face = colour if style == "-" else "none"
    taus = [length.tau or float("nan") for length in lengths]
    axes.scatter(places, taus, s=14, facecolors=face, edgecolors=colour, alpha=0.35, linewidths=0.8)
    smooth = [sum(lengths[around(number, len(lengths))], AcceptLength()).tau for number in range(len(lengths))]
    axes.plot(places, [tau or float("nan") for tau in smooth], color=colour, linestyle=style, linewidth=2.6)


def _draw_times(result: Result, axes: Axes) -> None:
    """Medians, phase by phase, for they depend on the load too, which is said where it changes."""
    agents = 0
    for phase in result.phases:
        rows = enumerate(result.sessions)
        found = {at: row.tpot_ms for at, row in rows if row.phase == phase.name and row.tpot_ms is not None}
        colour = NEW if phase.name == "recovered" else OLD
        places, times = list(found), list(found.values())
        axes.scatter(places, times, s=10, color=colour, alpha=0.35, linewidths=0)
        axes.plot(places, [median(times[around(number, len(times))]) for number in range(len(times))], color=colour)
        if phase.agents != agents and places:
            agents = phase.agents
            load = f"{agents} agents at once" if agents > 1 else "one agent"
            axes.text(
                places[0], 0.96, load, transform=axes.get_xaxis_transform(), va="top", fontsize=8.5, color="0.2",
                clip_on=True,
            )  # fmt: skip


def around(index: int, count: int) -> slice:
    """The `WINDOW` places of ``count`` around one; at the ends they are as many, so that no line starts anew."""
    start = min(max(0, index - WINDOW // 2), max(0, count - WINDOW))
    return slice(start, start + WINDOW)


def _mark_phases(phases: Sequence[tuple[float, str]], above: Axes, below: Axes, shown: tuple[float, float]) -> None:
    """A line where one phase ends and the next begins, and above it what each is that begins in what is shown."""
    for number, ((start, text), (end, _)) in enumerate(pairwise(phases)):
        for axes in (above, below):
            axes.axvspan(start, end, color="0.5", alpha=0.12 * (number % 2), linewidth=0)
            axes.axvline(start, color="0.35", linewidth=1, linestyle=":")
        if shown[0] <= start < shown[1]:
            above.annotate(
                text, ((start + end) / 2, 1.0), (0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", va="bottom", ha="center", fontsize=8.5, color="0.2",
            )  # fmt: skip
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)


def phases_of(result: Result) -> Iterator[tuple[float, str]]:
    """Where each phase begins, between two sessions, and what it is."""
    training_at = next((row.started - result.began for row in result.phases if row.name == "training"), None)
    moments = (
        (0.0, "before the\nrewrite"),
        (result.rewritten_at, "rewritten,\nnot noticed"),
        (result.detected_at, "drift noticed,\ncollecting"),
        (training_at, "training\nbeside serving"),
        (result.gate_at, "gate"),
        (result.swapped_at, AFTER),
    )
    for moment, text in moments:
        if moment is not None:
            yield sum(row.time <= result.began + moment for row in result.sessions) - 0.5, text


def _legend(result: Result) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    yield Line2D([], [], color=OLD, linewidth=2.6, label="old drafter")
    if result.judged is not None:
        yield Line2D([], [], color=NEW, linewidth=2.6, label="new drafter")
        again = "old drafter on the new one's answers (replayed)"
        yield Line2D([], [], color=OLD, linewidth=2.6, linestyle=DASHED, label=again)

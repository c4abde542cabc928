"""From evidence to a verdict: accepted, refused by a rule that says why, or inconclusive."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.statistics import Bounds, sessions_needed

Outcome = Literal["accepted", "refused", "inconclusive"]

Rule = Literal["leaked", "parity", "slower", "looping_only", "anchors_lost", "not_better", "thin", "undecided"]
"""Why a candidate was not accepted; the last two leave it open."""

LEAST_GAIN = 0.0005
"""What rounds to 0.0 % is none: drafts that differ by nothing but where they end differ by less."""

MIN_LOOPING = 5
"""Sessions with looping answers below which nothing is said about these."""


class Evidence(Struct, frozen=True, kw_only=True):
    """What a verdict rests on: relative gains in goodput and accept length, without looping answers.

    ``leaked`` and ``parity`` say in words what is wrong, None that nothing is; ``parity_checked`` is whether anything
    could be compared. Bounds are None below two sessions.
    """

    sessions: int = 0
    anchor_sessions: int = 0
    gain: Bounds | None = None
    tau_gain: Bounds | None = None
    anchor_gain: Bounds | None = None
    looping_gain: Bounds | None = None
    leaked: str | None = None
    parity: str | None = None
    parity_checked: bool = True


class Verdict(Struct, frozen=True):
    """``rule`` is the first of the broken ``rules``; ``more_sessions`` would decide at the present estimates."""

    outcome: Outcome
    rule: Rule | None
    rules: tuple[Rule, ...]
    reason: str
    more_sessions: int | None = None
    more_anchor_sessions: int | None = None


def decide(evidence: Evidence, config: GateConfig) -> Verdict:
    """Accept what is shown to be better and shown to keep the anchors; refuse what is shown not to.

    Both must be shown, so neither test pays for the other.
    """
    if evidence.leaked is not None:
        return Verdict("refused", "leaked", ("leaked",), evidence.leaked)
    if evidence.parity is not None:
        return Verdict("refused", "parity", ("parity",), evidence.parity)
    gain, tau_gain, anchors = evidence.gain, evidence.tau_gain, evidence.anchor_gain
    missing = max(config.min_sessions - evidence.sessions, 0)
    missing_anchors = max(config.min_anchor_sessions - evidence.anchor_sessions, 0)
    if missing or missing_anchors or gain is None or tau_gain is None or anchors is None:
        return Verdict(
            "inconclusive",
            "thin",
            ("thin",),
            f"{evidence.sessions} sessions of new traffic and {evidence.anchor_sessions} anchor sessions are too few: "
            f"{config.min_sessions} and {config.min_anchor_sessions} are asked for",
            missing,
            missing_anchors,
        )
    refusals = _refusals(gain, tau_gain, anchors, evidence.looping_gain, config.anchor_margin)
    if refusals:
        rules = tuple(refusals)
        return Verdict("refused", rules[0], rules, refusals[rules[0]])
    if not evidence.parity_checked:
        return Verdict(
            "inconclusive",
            "parity",
            ("parity",),
            "the engine gives none of the recorded answers again, so the replay could not be compared with it",
        )
    better, kept = gain.lower > LEAST_GAIN, -anchors.lower < config.anchor_margin
    if better and kept:
        return Verdict(
            "accepted",
            None,
            (),
            f"goodput changes on new traffic by {percent(gain.estimate)} (at least {percent(gain.lower)}) and on "
            f"anchors by {percent(anchors.estimate)} (at least {percent(anchors.lower)}, where "
            f"{percent(-config.anchor_margin)} is allowed)",
        )
    return Verdict(
        "inconclusive",
        "undecided",
        ("undecided",),
        f"goodput on new traffic changes by {percent(gain.estimate)} ({_range(gain)}), on anchors by "
        f"{percent(anchors.estimate)} ({_range(anchors)}): too wide to tell",
        0 if better else _more(gain, LEAST_GAIN),
        0 if kept else _more(anchors, -config.anchor_margin),
    )


def _refusals(
    gain: Bounds, tau_gain: Bounds, anchors: Bounds, looping: Bounds | None, margin: float
) -> dict[Rule, str]:
    """Every rule that is shown to be broken, with the sentence that says how, the most telling first."""
    broken: dict[Rule, str] = {}
    no_gain = gain.upper <= 0
    if no_gain and tau_gain.lower > 0:
        broken["slower"] = (
            f"accept length on new traffic rises by {percent(tau_gain.estimate)} ({_range(tau_gain)}), but drafts "
            f"cost so much that goodput changes by {percent(gain.estimate)} ({_range(gain)})"
        )
    if (
        looping is not None
        and looping.sessions >= MIN_LOOPING
        and gain.lower <= 0 < looping.lower
        and gain.upper < looping.lower
    ):
        broken["looping_only"] = (
            f"goodput rises only where answers loop, by {percent(looping.estimate)} ({_range(looping)}), which counts "
            f"for nothing; elsewhere it changes by {percent(gain.estimate)} ({_range(gain)})"
        )
    if anchors.upper < -margin:
        broken["anchors_lost"] = (
            f"goodput on anchors changes by {percent(anchors.estimate)} ({_range(anchors)}), and "
            f"{percent(-margin)} is allowed; on new traffic by {percent(gain.estimate)} ({_range(gain)})"
        )
    if no_gain:
        broken["not_better"] = (
            f"goodput on new traffic changes by {percent(gain.estimate)} ({_range(gain)}), which is no gain"
        )
    return broken


def _more(found: Bounds, threshold: float) -> int | None:
    needed = sessions_needed(found, threshold)
    return None if needed is None else max(needed - found.sessions, 1)


def _range(found: Bounds) -> str:
    return f"{percent(found.lower)} to {percent(found.upper)}"


def percent(share: float) -> str:
    return f"{round(share * 100, 1) + 0.0:+.1f} %".replace("-", "\u2212")

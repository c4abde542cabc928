"""What the gate found: a record for machines, and a page for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from redraft.engine.types import DrafterVersion
from redraft.feedback.drift.reference import Reference
from redraft.retrain.gate.measure import Answer, DraftCost
from redraft.retrain.gate.parity import Parity
from redraft.retrain.gate.statistics import Array, Bounds, bounds
from redraft.retrain.gate.verdict import Outcome, Rule, Verdict
from redraft.retrain.replay import AcceptCounts

SCHEMA = 1
NEW_TRAFFIC, ANCHORS, LOOPING = "new traffic", "anchors", "looping"


class Side(Struct, frozen=True, kw_only=True):
    """Sums of one drafter: ``ms`` is a request's share of its passes, goodput committed tokens a second over all."""

    committed: int
    verify_steps: int
    ms: float
    tau: float | None
    goodput: float | None
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, counts: AcceptCounts, ms: float) -> Side:
        return cls(
            committed=counts.committed,
            verify_steps=counts.verify_steps,
            ms=ms,
            tau=counts.length.tau,
            goodput=counts.committed / ms * 1e3 if ms else None,
            reached=counts.reached,
            accepted=counts.accepted,
        )

    def __add__(self, other: Side) -> Side:
        return Side.of(self.counts + other.counts, self.ms + other.ms)

    @property
    def counts(self) -> AcceptCounts:
        return AcceptCounts(self.committed, self.verify_steps, self.reached, self.accepted)

    @property
    def hazard(self) -> tuple[float | None, ...]:
        return self.counts.hazard


class SessionRow(Struct, frozen=True, kw_only=True):
    """One session's answers of one group; ``kind`` is `NEW_TRAFFIC` or `ANCHORS`."""

    session: str
    kind: str
    group: str
    looping: bool
    answers: int
    old: Side
    new: Side

    def __add__(self, other: SessionRow) -> SessionRow:
        return msgspec.structs.replace(
            self, answers=self.answers + other.answers, old=self.old + other.old, new=self.new + other.new
        )


class Comparison(Struct, frozen=True, kw_only=True):
    """Old against new over sessions; bounds are None below two of them."""

    name: str
    sessions: int
    answers: int
    old: Side
    new: Side
    gain: Bounds | None
    tau_gain: Bounds | None


class Leak(Struct, frozen=True, kw_only=True):
    """Judging sessions that training saw by name, and those set aside because it saw most of an answer of theirs."""

    named: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """Everything a verdict rests on.

    ``look`` is which test of its series this was, ``level`` the confidence of each bound. ``*_hash`` say which sessions
    judged and which costs were reckoned with. Comparisons are None where a leak made them worthless.
    """

    schema: int = SCHEMA
    verdict: Verdict
    time: str
    target: str
    old: DrafterVersion
    new: DrafterVersion
    block_length: int
    look: int
    level: float
    config: dict[str, int | float]
    gate_hash: str
    anchor_hash: str
    costs_hash: str
    unusable: int
    leak: Leak
    draft_cost: DraftCost | None = None
    parity: Parity | None = None
    new_traffic: Comparison | None = None
    anchors: Comparison | None = None
    looping: Comparison | None = None
    groups: tuple[Comparison, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
    references: tuple[Reference, ...] = ()

    @property
    def outcome(self) -> Outcome:
        return self.verdict.outcome

    @property
    def rule(self) -> Rule | None:
        return self.verdict.rule


def session_rows(kind: str, answers: Iterable[Answer]) -> list[SessionRow]:
    """Answers pooled by session and source, looping ones apart."""
    pooled: dict[tuple[str, str, bool], SessionRow] = {}
    for answer in answers:
        key = (answer.sample.session, answer.sample.source, answer.looping)
        row = SessionRow(
            session=key[0],
            kind=kind,
            group=key[1],
            looping=key[2],
            answers=1,
            old=Side.of(answer.old, answer.old_ms),
            new=Side.of(answer.new, answer.new_ms),
        )
        pooled[key] = pooled[key] + row if key in pooled else row
    return list(pooled.values())


def compare(name: str, rows: Sequence[SessionRow], *, level: float, draws: int, seed: int) -> Comparison | None:
    """Rows of whole sessions against one another; None if there is nothing in them to compare."""
    rows = [row for row in rows if row.old.verify_steps]
    if not rows:
        return None
    total = rows[0]
    for row in rows[1:]:
        total += row
    times, verify_steps = paired_sums(rows)
    enough = len(times) > 1
    return Comparison(
        name=name,
        sessions=len(times),
        answers=total.answers,
        old=total.old,
        new=total.new,
        gain=bounds(times, level=level, draws=draws, seed=seed) if enough else None,
        tau_gain=bounds(verify_steps, level=level, draws=draws, seed=seed) if enough else None,
    )


def paired_sums(rows: Iterable[SessionRow]) -> tuple[Array, Array]:
    """Milliseconds and verify steps by session, [sessions, 2] each, old and new.

    Both drafters commit the same answers, so goodput and accept length gain what these lose.
    """
    sums: dict[str, Array] = {}
    for row in rows:
        each = np.array([[row.old.ms, row.new.ms], [row.old.verify_steps, row.new.verify_steps]], dtype=np.float64)
        sums[row.session] = sums.get(row.session, np.zeros((2, 2))) + each
    stacked = np.array([sums[session] for session in sorted(sums)])
    return stacked[:, 0], stacked[:, 1]

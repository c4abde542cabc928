"""What is known of a drafter version: facts that never change, and a history that only grows."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from msgspec import Struct

from redraft.engine.types import AcceptLength, DrafterVersion
from redraft.feedback.drift.reference import Reference
from redraft.retrain.provenance import Provenance

Origin = Literal["bundled", "trained", "imported"]

State = Literal["candidate", "accepted", "refused", "inconclusive", "serving", "retired", "rolled_back"]
"""A candidate becomes accepted, refused or inconclusive, which may be judged again. An accepted or retired version may
serve; what served is retired when another takes over, or rolled back. A person may force any to ``accepted``."""

Verdict = Literal["accepted", "refused", "inconclusive"]
"""What a gate can say."""


class VersionRecord(Struct, frozen=True, kw_only=True):
    """What a version is; ``why`` says what had it made: the drift signal in words, ``nightly`` or ``manual``.

    ``parent`` is the version that training began from. ``references`` are the levels that drift is measured from, where
    they are known before any gate. ``created`` is in seconds since 1970.
    """

    version: DrafterVersion
    target: str
    origin: Origin
    why: str
    parent: DrafterVersion | None = None
    provenance: Provenance | None = None
    references: tuple[Reference, ...] = ()
    created: float = msgspec.field(default_factory=time.time)


class GateResult(Struct, frozen=True, kw_only=True):
    """What a gate found: where its report lies, its numbers, and the levels that it predicts per stratum."""

    report: str
    accept_length: AcceptLength
    numbers: dict[str, float] = {}
    references: tuple[Reference, ...] = ()


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version's change of state: who made it, when (seconds since 1970) and why.

    ``forced`` marks a person's decision against the gate's or without it. The entry that a version begins to serve with
    has the pointer's ``token`` and the ``previous`` version that served.
    """

    state: State
    time: float
    who: str
    why: str
    forced: bool = False
    gate: GateResult | None = None
    previous: DrafterVersion | None = None
    token: int = 0


class Entered(Struct, frozen=True):
    """A version as the registry has it."""

    record: VersionRecord
    history: tuple[Entry, ...]

    @property
    def version(self) -> DrafterVersion:
        return self.record.version

    @property
    def state(self) -> State:
        return self.history[-1].state

    @property
    def gate(self) -> GateResult | None:
        """The last gate's result."""
        return next((entry.gate for entry in reversed(self.history) if entry.gate), None)

    @property
    def references(self) -> tuple[Reference, ...]:
        """The levels that drift is measured from: the gate's if it gave any."""
        return (self.gate.references if self.gate else ()) or self.record.references

    @property
    def replaced(self) -> DrafterVersion | None:
        """What served before this version did."""
        return next((entry.previous for entry in reversed(self.history) if entry.state == "serving"), None)

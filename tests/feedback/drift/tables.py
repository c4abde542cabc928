"""Print the tables of ``ops/docs/drift.md``: how much recorded sessions differ, and how soon a change is found.

python tests/feedback/drift/tables.py [STREAMS]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from traffic import (
    DFLASH,
    Rng,
    Session,
    Traffic,
    changed,
    drawn,
    recorded,
    reference,
    stratum,
    thinned,
)

from redraft.engine.types import Stratum
from redraft.feedback.drift.config import DriftConfig
from redraft.feedback.drift.monitor import DriftMonitor
from redraft.feedback.drift.reference import Profile

SHARES = (1.0, 0.2, 0.05)
CHANGES = (-0.05, -0.1, -0.2, 0.1)
REFERENCE_SESSIONS = 500
LONGEST = 1000

Strata = dict[Stratum, list[Session]]


def explored(rng: Rng, sessions: Sequence[Session], share: float) -> list[Session]:
    copies = 1 if share == 1 else 20
    made = [thinned(rng, counts, share=share) for counts in sessions for _ in range(copies)]
    return [counts for counts in made if counts[0][0]]


def spread(rng: Rng, strata: Strata) -> None:
    print("| agent type | sessions | steps a session | tau | CV, all steps explored | CV, 20 % | CV, 5 % |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    pooled = [counts for own in strata.values() for counts in own]
    for name, own in [*((at.agent_type, own) for at, own in strata.items()), ("all in one stratum", pooled)]:
        found = [reference(explored(rng, own, share)) for share in SHARES]
        length = Profile.of(found[0].reached, found[0].accepted).tau
        cvs = " | ".join(f"{each.cv:.2f}" for each in found)
        print(f"| {name} | {len(own)} | {found[0].exposure:.0f} | {length:.2f} | {cvs} |")


def delays(rng: Rng, before: Strata, after: Strata, mix: list[float], streams: int) -> str:
    found = []
    for stream in range(streams):
        if stream % 10 == 0:
            known = [reference(drawn(rng, own, REFERENCE_SESSIONS), at, DFLASH) for at, own in before.items()]
        monitor = DriftMonitor(DriftConfig(), known)
        for event in Traffic(rng, before, mix)(300):
            monitor.update(event)
        events = Traffic(rng, after, mix)(LONGEST)
        found.append(next((n for n, event in enumerate(events, 1) if monitor.update(event)), LONGEST + 1))
    median = np.median(found)
    within = sum(delay <= 200 for delay in found) / streams
    return f"{within:.2f} ({f'{median:.0f}' if median <= LONGEST else f'> {LONGEST}'})"


def power(rng: Rng, strata: Strata, share: float, streams: int) -> None:
    print(f"| {share:.0%} of the steps explored | -5 % | -10 % | -20 % | +10 % |")
    print("| --- | --- | --- | --- | --- |")
    seen = {at: explored(rng, own, share) for at, own in strata.items()}
    total = sum(map(len, strata.values()))
    cases = [(at.agent_type, {at: own}, [1.0]) for at, own in seen.items()]
    cases.append(("all strata at once", seen, [len(own) / total for own in strata.values()]))
    for name, own, mix in cases:
        cells = []
        for change in CHANGES:
            size = change if change < 0 else 1 / (1 + change) - 1
            other = {at: changed(rng, sessions, size, copies=5 if share == 1 else 1) for at, sessions in own.items()}
            pair = (own, other) if change < 0 else (other, own)
            cells.append(delays(rng, *pair, mix, streams))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def false_alarms(rng: Rng, strata: Strata, days: int) -> None:
    """Reference errors included: anew every tenth day."""
    total = sum(map(len, strata.values()))
    alarms = 0
    for day in range(days):
        if day % 10 == 0:
            known = [reference(drawn(rng, own, REFERENCE_SESSIONS), at, DFLASH) for at, own in strata.items()]
        monitor = DriftMonitor(DriftConfig(), known)
        events = Traffic(rng, strata, [len(own) / total for own in strata.values()])(1000)
        alarms += sum(len(monitor.update(event)) for event in events)
    print(f"{alarms} false alarms in {days} days of 1,000 sessions")


def main(streams: int) -> None:
    rng = np.random.default_rng(0)
    strata = {stratum(agent): sessions for agent, sessions in recorded().items()}
    spread(rng, strata)
    false_alarms(rng, strata, 5 * streams)
    for share in SHARES[:2]:
        power(rng, strata, share, streams)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)

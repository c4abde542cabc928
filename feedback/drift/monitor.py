"""Drift of every stratum a drafter serves, and of all of them together, from the events of finished answers.

A stratum's sessions are compared with its own reference, so a change of mix moves nothing: the chart over all strata
adds up departures from what each stratum should have done (indirect standardisation), never accept lengths.

Residuals enter turn by turn, and everything that says how far chance carries them (variance, interval) is of whole
sessions: turns of a session may depend on one another, and sessions may interleave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import zip_longest

import msgspec
from msgspec import Struct, field

from redraft.engine.types import AcceptLength, DrafterVersion, Stratum
from redraft.feedback.drift.chart import MIN_SESSIONS, Chart
from redraft.feedback.drift.config import DriftConfig
from redraft.feedback.drift.cusum import Scale, threshold
from redraft.feedback.drift.reference import Profile, Reference, make_reference
from redraft.feedback.drift.signal import DriftSignal, DriftStatus, State, StratumStatus
from redraft.feedback.events import StepCounts, TurnEvent

FLOOR = "ngram"
FLOOR_TURNS = 1_000
"""Answers in a row without a trained drafter after which the n-gram floor is taken as what serves."""

OTHER = Stratum("other", "other", 0, "sampled", False)
"""Where strata beyond `MAX_STRATA` a version are counted; what is in it changes, so it is never watched."""

MAX_STRATA = 64
MAX_VERSIONS = 4
MAX_SESSIONS = 10_000
RESCALE_TURNS = 100
_RESCALE_AT = frozenset(50 * 2**power for power in range(40))
CHARTS_A_SESSION = 4
"""A session's residuals enter two sides of two charts: its stratum's, and that over all strata."""

LEARNT_ERROR = 3
"""A learnt reference takes as many sessions as bring its standard error under this part of the effect floor, ..."""

MOST_LEARNING = 5
"""... up to so many times ``learning_sessions``."""

Key = tuple[DrafterVersion, Stratum]


class _Cell(Struct, kw_only=True):
    """One drafter version in one stratum."""

    number: int
    stratum: Stratum
    drafter: DrafterVersion
    new: bool
    reference: Reference | None
    learning: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    to_learn: int
    exposure: float | None = None
    committed: int = 0
    verify_steps: int = 0
    explored_steps: int = 0
    chart: Chart = field(default_factory=Chart)
    last_seen: float = 0.0


class _Whole(Struct, kw_only=True):
    """One drafter version over all strata that are watched.

    ``recent`` holds residuals in standard deviations, by session and cell. A session's strata may depend on one
    another: increments are divided by ``inflation``, how much more its sum varies than independent ones would.
    """

    drafter: DrafterVersion
    chart: Chart = field(default_factory=Chart)
    recent: dict[str, dict[int, float]] = field(default_factory=dict)
    inflation: float = 1.0
    height: float | None = None
    last_seen: float = 0.0


class _Memory(Struct, kw_only=True):
    """All that a restarted monitor must know."""

    references: list[Reference] = field(default_factory=list)
    cells: list[_Cell] = field(default_factory=list)
    wholes: list[_Whole] = field(default_factory=list)
    sessions: dict[str, DrafterVersion] = field(default_factory=dict)
    numbers: int = 0
    floor_turns: int = FLOOR_TURNS
    looping: int = 0
    two_versions: int = 0


class _Watch:
    """What follows from a cell's reference and the exploration steps that its sessions have now."""

    def __init__(self, reference: Reference, exposure: float, config: DriftConfig) -> None:
        self.profile = Profile.of(reference.reached, reference.accepted)
        self.scale = Scale.of(reference, config.effect_floor, exposure)
        self.error = reference.cv / math.sqrt(reference.sessions)
        run_length = CHARTS_A_SESSION * config.sessions_per_false_alarm
        self.threshold = threshold(self.scale.drift, run_length, self.scale.evidence, reference.kurtosis)


class DriftMonitor:
    """Takes finished answers, sessions in any order; gives signals, and a status whenever asked.

    Its memory is bounded: the latest `MAX_VERSIONS` drafter versions, `MAX_STRATA` strata each, `MAX_SESSIONS`
    sessions.
    """

    def __init__(self, config: DriftConfig, references: Iterable[Reference] = (), state: bytes | None = None) -> None:
        """``state`` is what `save` gave; raises ``msgspec.MsgspecError`` if it is not."""
        self._config = config
        self._memory = msgspec.msgpack.decode(state, type=_Memory) if state else _Memory()
        self._cells: dict[Key, _Cell] = {(cell.drafter, cell.stratum): cell for cell in self._memory.cells}
        self._wholes = {whole.drafter: whole for whole in self._memory.wholes}
        self._watches: dict[Key, _Watch] = {}
        for reference in references:
            self.expect(reference)

    def save(self) -> bytes:
        """Everything but the configuration; a monitor made of it goes on as this one would."""
        return msgspec.msgpack.encode(self._memory)

    def expect(self, reference: Reference) -> None:
        """Compare a drafter version's stratum with this from now on, and not with what was or would be learnt.

        One of too few sessions is passed over.
        """
        key = (reference.drafter, reference.stratum)
        known = [r for r in self._memory.references if (r.drafter, r.stratum) != key]
        if reference.sessions < MIN_SESSIONS or reference in self._memory.references:
            return
        self._memory.references = [*known, reference][-MAX_VERSIONS * MAX_STRATA :]
        if key in self._cells:
            cell = self._cells[key]
            cell.reference, cell.chart, cell.exposure = reference, Chart(), None
            cell.learning.clear()
            self._watches.pop(key, None)

    def update(self, event: TurnEvent) -> list[DriftSignal]:
        """Enter one answer; signals it set off, most often none."""
        drafter = self._judged(event)
        if drafter is None:
            return []
        session = event.origin.session
        signals = []
        watched: list[tuple[_Cell, _Watch, float, int]] = []
        for counts in event.counts:
            if counts.drafter != drafter:
                continue
            cell = self._cell(counts)
            cell.committed += counts.committed
            cell.verify_steps += counts.verify_steps
            cell.explored_steps += counts.explored_steps
            cell.last_seen = event.time
            if not any(counts.reached[:1]):
                continue
            if cell.reference is None:
                self._learn(cell, session, counts)
                continue
            watch = self._watch(cell, cell.reference)
            residual, exposure = watch.profile.residual(counts.reached, counts.accepted), counts.reached[0]
            drop, rise = watch.scale.increments(residual, exposure, self._config.effect_floor)
            cell.chart.add(session, residual, exposure, drop, rise, event.time)
            if cell.chart.turns in _RESCALE_AT:
                self._rescale(cell)
            watched.append((cell, watch, residual, exposure))
            signals += self._signals(cell.chart, watch.threshold, watch.error, cell, event.time)
        if watched:
            signals += self._add_to_whole(drafter, session, watched, event.time)
        return signals

    def status(self) -> DriftStatus:
        cells = sorted(
            self._memory.cells, key=lambda cell: (-cell.last_seen, cell.stratum.tenant, cell.stratum.agent_type)
        )
        return DriftStatus(
            strata=(*map(self._whole_status, self._memory.wholes), *map(self._cell_status, cells)),
            looping=self._memory.looping,
            two_versions=self._memory.two_versions,
        )

    def _judged(self, event: TurnEvent) -> DrafterVersion | None:
        """Whose steps of an answer are judged; None if nobody's are."""
        memory = self._memory
        drafters = {counts.drafter for counts in event.counts}
        trained = {drafter for drafter in drafters if drafter.kind != FLOOR}
        memory.floor_turns = 0 if trained else memory.floor_turns + bool(drafters)
        if not trained and memory.floor_turns < FLOOR_TURNS:
            return None
        served = trained or drafters
        if not served:
            return None
        if event.looping:
            memory.looping += 1
            return None
        drafter = min(served, key=lambda version: version.id)
        first = memory.sessions.pop(event.origin.session, drafter)
        memory.sessions[event.origin.session] = first
        if len(memory.sessions) > MAX_SESSIONS:
            del memory.sessions[next(iter(memory.sessions))]
        if len(served) > 1 or first != drafter:
            memory.two_versions += 1
            return None
        return drafter

    def _cell(self, counts: StepCounts) -> _Cell:
        key = (counts.drafter, counts.stratum)
        if key in self._cells:
            return self._cells[key]
        own = [cell for cell in self._memory.cells if cell.drafter == counts.drafter]
        if len(own) >= MAX_STRATA:
            key = (counts.drafter, OTHER)
            if key in self._cells:
                return self._cells[key]
        given = [r for r in self._memory.references if (r.drafter, r.stratum) == key]
        cell = _Cell(
            number=self._memory.numbers,
            drafter=counts.drafter,
            stratum=key[1],
            new=any(other.reference for other in own) and not given,
            reference=given[0] if given else None,
            to_learn=self._config.learning_sessions,
        )
        self._memory.numbers += 1
        self._memory.cells.append(cell)
        self._cells[key] = cell
        if not own:
            self._forget_versions()
        return cell

    def _forget_versions(self) -> None:
        memory = self._memory
        seen: dict[DrafterVersion, float] = {}
        for cell in memory.cells:
            seen[cell.drafter] = max(seen.get(cell.drafter, -math.inf), cell.last_seen)
        newest = memory.cells[-1].drafter
        kept = {newest, *sorted(seen.keys() - {newest}, key=lambda version: seen[version])[-(MAX_VERSIONS - 1) :]}
        memory.cells = [cell for cell in memory.cells if cell.drafter in kept]
        memory.wholes = [whole for whole in memory.wholes if whole.drafter in kept]
        self._cells = {(cell.drafter, cell.stratum): cell for cell in memory.cells}
        self._wholes = {whole.drafter: whole for whole in memory.wholes}
        self._watches = {key: watch for key, watch in self._watches.items() if key in self._cells}

    def _learn(self, cell: _Cell, session: str, counts: StepCounts) -> None:
        """Add to a reference in the making; the first session after the last it needs completes it."""
        if cell.stratum == OTHER:
            return
        if session in cell.learning:
            reached, accepted = cell.learning[session]
            cell.learning[session] = (_added(reached, counts.reached), _added(accepted, counts.accepted))
            return
        if len(cell.learning) >= cell.to_learn:
            reference = make_reference(cell.stratum, cell.drafter, list(cell.learning.values()))
            needed = math.ceil((LEARNT_ERROR * reference.cv / self._config.effect_floor) ** 2)
            cell.to_learn = min(max(cell.to_learn, needed), MOST_LEARNING * self._config.learning_sessions)
            if len(cell.learning) >= cell.to_learn:
                cell.reference = reference
                cell.learning.clear()
                return
        cell.learning[session] = (counts.reached, counts.accepted)

    def _watch(self, cell: _Cell, reference: Reference) -> _Watch:
        key = (cell.drafter, cell.stratum)
        if key not in self._watches:
            self._watches[key] = _Watch(reference, cell.exposure or reference.exposure, self._config)
        return self._watches[key]

    def _rescale(self, cell: _Cell) -> None:
        """Expect of a session what sessions have brought so far: lengths and the exploration share may have changed."""
        cell.exposure = cell.chart.exposure / cell.chart.sessions
        self._watches.pop((cell.drafter, cell.stratum))

    def _signals(
        self, chart: Chart, threshold: float, error: float, of: _Cell | _Whole, time: float
    ) -> list[DriftSignal]:
        alarm = chart.alarm(threshold, self._config.effect_floor, error)
        if alarm is None:
            return []
        direction, side, estimate = alarm
        signal = DriftSignal(
            time=time,
            since=side.since,
            stratum=of.stratum if isinstance(of, _Cell) else None,
            drafter=of.drafter,
            direction=direction,
            estimate=estimate,
            reference=of.reference if isinstance(of, _Cell) else None,
        )
        chart.cool(signal, self._config.cooldown_sessions)
        return [signal]

    def _add_to_whole(
        self, drafter: DrafterVersion, session: str, watched: list[tuple[_Cell, _Watch, float, int]], time: float
    ) -> list[DriftSignal]:
        whole = self._wholes.get(drafter)
        if whole is None:
            whole = self._wholes[drafter] = _Whole(drafter=drafter)
            self._memory.wholes.append(whole)
        whole.last_seen = time
        deviations = whole.recent.setdefault(session, {})
        drop = rise = residual = exposure = 0.0
        for cell, watch, own_residual, own_exposure in watched:
            lower, upper = watch.scale.increments(own_residual, own_exposure, self._config.effect_floor)
            drop, rise = drop + lower / whole.inflation, rise + upper / whole.inflation
            residual, exposure = residual + own_residual, exposure + own_exposure
            deviations[cell.number] = deviations.get(cell.number, 0.0) + own_residual / watch.scale.deviation
        if len(whole.recent) > self._config.learning_sessions:
            del whole.recent[next(iter(whole.recent))]
        whole.chart.add(session, residual, exposure, drop, rise, time)
        if len(whole.recent) >= self._config.learning_sessions and whole.chart.turns % RESCALE_TURNS == 0:
            self._rescale_whole(whole)
        if whole.height is None:
            return []
        return self._signals(whole.chart, whole.height, self._whole_error(drafter), whole, time)

    def _rescale_whole(self, whole: _Whole) -> None:
        """Set the height of the chart over all strata by its latest sessions; none while there is but one stratum."""
        watched = self._watched(whole.drafter)
        if len(watched) < 2:
            return
        by_number = {cell.number: watch for cell, _, watch in watched}
        sums = [sum(deviations.values()) ** 2 for deviations in whole.recent.values()]
        squares = [z**2 for deviations in whole.recent.values() for z in deviations.values()]
        information = [
            by_number[number].scale.drift ** 2 for deviations in whole.recent.values() for number in deviations
        ]
        whole.inflation = max(1.0, sum(sums) / sum(squares))
        whole.height = threshold(
            math.sqrt(sum(information) / len(whole.recent) / whole.inflation),
            CHARTS_A_SESSION * self._config.sessions_per_false_alarm,
            sum(watch.scale.evidence for _, _, watch in watched),
            max(reference.kurtosis for _, reference, _ in watched),
        )

    def _watched(self, drafter: DrafterVersion) -> list[tuple[_Cell, Reference, _Watch]]:
        return [
            (cell, cell.reference, self._watch(cell, cell.reference))
            for cell in self._memory.cells
            if cell.drafter == drafter and cell.reference is not None
        ]

    def _whole_error(self, drafter: DrafterVersion) -> float:
        """Standard error that the references of all strata bring into a change over all of them."""
        watched = self._watched(drafter)
        steps = sum(cell.explored_steps for cell, _, _ in watched)
        return math.sqrt(sum((cell.explored_steps / steps * watch.error) ** 2 for cell, _, watch in watched))

    def _cell_status(self, cell: _Cell) -> StratumStatus:
        if cell.reference is None:
            return self._status(cell.chart, None, 0.0, "not watched" if cell.stratum == OTHER else "learning", cell)
        watch = self._watch(cell, cell.reference)
        return self._status(cell.chart, watch.threshold, watch.error, "watching", cell)

    def _whole_status(self, whole: _Whole) -> StratumStatus:
        state: State = "learning" if whole.height is None else "watching"
        return self._status(whole.chart, whole.height, self._whole_error(whole.drafter), state, whole)

    def _status(
        self, chart: Chart, threshold: float | None, error: float, state: State, of: _Cell | _Whole
    ) -> StratumStatus:
        estimate = chart.latest(error)
        direction, side = chart.leading
        signal = chart.signal
        if signal is not None:
            effect = (estimate or signal.estimate).effect
            past = (effect if signal.direction == "rise" else -effect) >= self._config.effect_floor
            if past:
                state = "drifted"
            elif chart.sessions < chart.quiet_until:
                state = "cooling"
        cells = [of] if isinstance(of, _Cell) else [c for c in self._memory.cells if c.drafter == of.drafter]
        reference = of.reference if isinstance(of, _Cell) else None
        return StratumStatus(
            stratum=of.stratum if isinstance(of, _Cell) else None,
            drafter=of.drafter,
            state=state,
            new=isinstance(of, _Cell) and of.new,
            learnt=len(of.learning if isinstance(of, _Cell) else of.recent),
            to_learn=of.to_learn if isinstance(of, _Cell) else self._config.learning_sessions,
            sessions=chart.sessions,
            accept_length=AcceptLength(sum(c.committed for c in cells), sum(c.verify_steps for c in cells)),
            explored_steps=sum(c.explored_steps for c in cells),
            reference=reference,
            reference_tau=Profile.of(reference.reached, reference.accepted).tau if reference else None,
            estimate=estimate,
            direction=direction,
            statistic=side.height,
            threshold=threshold,
            since=signal.since if signal and state == "drifted" else side.since if side.height else None,
            signal=signal,
            last_seen=of.last_seen,
        )


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))

"""One turn of the loop: what was captured trains a candidate, the gate judges it, and what it accepts may serve.

Each run has a folder. A run that was stopped goes on in its own, on the data it began with; a run that ended leaves
its log and the gate's report there, and no tokens.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from redraft.engine.drafters.loading import content_id
from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.cost import CostTable
from redraft.engine.types import Capabilities, DrafterVersion, Stratum
from redraft.feedback.contexts import ContextStore
from redraft.feedback.events import Event
from redraft.retrain.background import Duty, stopped_by_signals
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import Stopped, TrainingError
from redraft.retrain.features_store import FeatureStore
from redraft.retrain.files import replace
from redraft.retrain.finetune import Candidate, finetune
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate import writing
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.judge import judge
from redraft.retrain.gate.measure import check_measured
from redraft.retrain.gate.seen import TrainingRecord
from redraft.retrain.loop_config import RUN_DATA
from redraft.retrain.period import Period
from redraft.retrain.registry.judged import record_verdict
from redraft.retrain.registry.record import Entered, VersionRecord
from redraft.retrain.registry.registry import Registry
from redraft.retrain.saving import written
from redraft.retrain.traffic import TrafficData, collect, with_later_gate
from redraft.retrain.traffic_config import TrafficConfig
from redraft.retrain.trainer import Progress, silent

Result = Literal["accepted", "refused", "inconclusive", "too little"]

OUTCOME, REPORT = "outcome.json", "gate"
"""Of a run's folder: how a finished one ended, and the gate's report."""


class Outcome(Struct, frozen=True):
    """How a run ended and why, in words; ``version`` is the candidate's, where there was one to be judged."""

    result: Result
    reason: str
    version: DrafterVersion | None = None
    report: str | None = None


@dataclass(frozen=True)
class Loop:
    """All that a run works with; ``folder`` keeps the runs, ``events`` reads the whole log.

    ``engine`` makes an idle engine that serves the drafter in a folder; ``costs`` are the serving engine's.
    """

    folder: Path
    events: Callable[[], Iterable[Event]]
    contexts: ContextStore
    registry: Registry
    target: FrozenTarget
    features: FeatureStore
    recipe: TrainConfig
    traffic: TrafficConfig
    gate: GateConfig
    costs: CostTable
    engine: Callable[[Path], tuple[EngineCore, Capabilities]]
    block_length: int
    busy: Callable[[], bool]

    def run_once(
        self,
        serving: DrafterVersion,
        period: Period,
        progress: Progress = silent,
        begins: Callable[[Period, bool], None] = lambda period, again: None,
    ) -> Outcome:
        """Train a candidate from ``serving`` and judge it; the registry has it then, and nothing serves otherwise.

        A run that was stopped goes on instead, in its own period: ``begins`` is told which, and whether it is such a
        run. Raises `TrainingError` if another run is under way, the engine has not measured ``serving``, or this run
        cannot go on, which is given up then; `Stopped` if it was asked to stop, and `OSError` where the disk is full,
        upon which it can go on later.
        """
        with _alone(self.folder):
            check_measured(self.costs, serving)
            stopped = _unfinished(self.folder, serving)
            run = stopped or _begin(self.folder, serving, period)
            begins(run.period, stopped is not None)
            try:
                outcome = self._run(run, serving, progress)
            except Stopped:
                raise
            except TrainingError as error:
                _finish(run.folder, Outcome("refused", f"the run could not go on: {error}"))
                raise
            _finish(run.folder, outcome)
            return outcome

    def _run(self, run: _Run, serving: DrafterVersion, progress: Progress) -> Outcome:
        data = self._data(run)
        missing = self._missing(data)
        if missing:
            return Outcome("too little", missing)
        parent = self.registry.path(serving)
        candidate = finetune(
            data,
            target=self.target,
            serving=parent,
            out=run.folder / "training",
            config=self.recipe,
            features=self.features,
            busy=lambda: self._busy(run),
            progress=progress,
        )
        if candidate.step == 0:
            return Outcome(
                "refused", "no step of training drafted better than the serving version on held-out sessions"
            )
        entered = self._register(candidate, serving, run)
        version = entered.version
        if entered.state not in ("candidate", "inconclusive"):
            result: Result = "accepted" if entered.state in ("accepted", "serving") else "refused"
            again = f"training came to version {version.id} once more, which is {entered.state}"
            report_file = entered.gate.report if entered.gate else None
            return Outcome(result, f"{again}: {entered.history[-1].why}", version, report_file)
        seen = TrainingRecord.of([*data.train, *data.replay, *data.validation])
        replace(self._seen_file(version), msgspec.msgpack.encode(seen))
        data = with_later_gate(data, self.events(), self.contexts, self.traffic)
        with stopped_by_signals() as stop:
            report = judge(
                data.gate,
                data.anchor,
                old=parent,
                new=self.registry.path(version),
                target=self.target,
                costs=self.costs,
                engine=self.engine,
                seen=self._seen(version),
                block_length=self.block_length,
                config=self.gate,
                look=1 + self._looks(serving),
                stratum=_stratum,
                between=Duty(lambda: self._busy(run), stop),
                progress=progress,
            )
        with written(run.folder / REPORT):
            writing.write(report, run.folder / REPORT)
        record_verdict(self.registry, report, run.folder / REPORT / writing.PAGE)
        return Outcome(report.outcome, report.verdict.reason, version, str(run.folder / REPORT / writing.PAGE))

    def _data(self, run: _Run) -> TrafficData:
        file = run.folder / RUN_DATA
        if _has_data(run.folder):
            try:
                return msgspec.msgpack.decode(file.read_bytes(), type=TrafficData)
            except msgspec.DecodeError as error:
                raise TrainingError(f"{file} cannot be read ({error}); the next run collects anew") from error
        replace(file, b"")  # what is erased from now on takes it away
        data = collect(
            self.events(),
            self.contexts,
            target=self.target.identity,
            since=run.period.since,
            config=self.traffic,
        )
        self._check_kept(run)
        replace(file, msgspec.msgpack.encode(data))
        return data

    def _busy(self, run: _Run) -> bool:
        self._check_kept(run)
        return self.busy()

    def _check_kept(self, run: _Run) -> None:
        """Raises `TrainingError` if a run's data were erased; features that it wrote since are dropped."""
        if not (run.folder / RUN_DATA).exists():
            self.features.clear()
            raise TrainingError("what it learns from was erased meanwhile; run it again, on what is left")

    def _missing(self, data: TrafficData) -> str:
        """What keeps a run from an answer, in words; sessions to judge by may still come while it trains."""
        anchors, gate = (len({sample.session for sample in side if sample.greedy}) for side in (data.anchor, data.gate))
        lacking = []
        if not data.train:
            lacking.append("no session to learn from")
        if anchors < self.gate.min_anchor_sessions:
            lacking.append(f"{anchors} of {self.gate.min_anchor_sessions} anchor sessions with greedy answers")
        if gate * 2 < self.gate.min_sessions:
            wanted = self.gate.min_sessions
            lacking.append(f"{gate} of {wanted} sessions to judge by with greedy answers, not even half")
        if not lacking:
            return ""
        left_out = ", ".join(f"{count} {why}" for why, count in data.left_out.items())
        return f"there are {'; '.join(lacking)}" + (f" (turns left out: {left_out})" if left_out else "")

    def _register(self, candidate: Candidate, parent: DrafterVersion, run: _Run) -> Entered:
        record = VersionRecord(
            version=DrafterVersion(parent.kind, content_id(candidate.folder)),
            target=self.target.identity,
            origin="trained",
            why=run.period.why,
            parent=parent,
            provenance=candidate.provenance,
        )
        return self.registry.get(self.registry.add(candidate.folder, record, who="training"))

    def _looks(self, serving: DrafterVersion) -> int:
        """How often candidates were already judged against the version that serves; a damaged record may hide once."""
        return len(self.registry.damaged()) + sum(
            entry.gate is not None
            for entered in self.registry.all()
            if entered.record.parent == serving
            for entry in entered.history
        )

    def _seen_file(self, version: DrafterVersion) -> Path:
        return self.folder / f"seen-{version.id}.msgpack"

    def _seen(self, version: DrafterVersion) -> TrainingRecord:
        """What a version and its ancestors learnt from; that of those trained elsewhere is not known.

        Where a record is lost, so that ancestors are not known, it is what any version learnt from.
        """
        line = self.registry.lineage(version)
        files = [self._seen_file(entered.version) for entered in line]
        if line[-1].record.parent:
            files = list(self.folder.glob("seen-*.msgpack"))
        seen = TrainingRecord()
        for file in files:
            with suppress(FileNotFoundError):
                seen |= msgspec.msgpack.decode(file.read_bytes(), type=TrainingRecord)
        return seen


def _stratum(sample: Sample, bucket: int) -> Stratum:
    return Stratum(sample.family, sample.source, bucket, "greedy", constrained=False)


class _Run(Struct, frozen=True):
    folder: Path
    period: Period


class _Begun(Struct, frozen=True):
    """What a run's folder says of it from the beginning."""

    serving: DrafterVersion
    period: Period


_BEGUN = "run.json"


def _runs(folder: Path) -> Iterator[Path]:
    return (each for each in folder.iterdir() if re.fullmatch("[0-9]{5,}", each.name) and each.is_dir())


def _begin(folder: Path, serving: DrafterVersion, period: Period) -> _Run:
    number = 1 + max((int(each.name) for each in _runs(folder)), default=0)
    run = folder / f"{number:05d}"
    run.mkdir()
    replace(run / _BEGUN, msgspec.json.encode(_Begun(serving, period)))
    return _Run(run, period)


def _unfinished(folder: Path, serving: DrafterVersion) -> _Run | None:
    """The last run if it was stopped; one without data, or from another version, is of no use any more."""
    last = max(_runs(folder), default=None)
    if last is None or (last / OUTCOME).exists() or not (last / _BEGUN).exists():
        return None
    try:
        begun = msgspec.json.decode((last / _BEGUN).read_bytes(), type=_Begun)
    except msgspec.DecodeError as error:
        _finish(last, Outcome("refused", f"{last / _BEGUN} cannot be read ({error})"))
        return None
    if begun.serving != serving:
        _finish(last, Outcome("refused", "another version serves than the one that training began from"))
        return None
    if not _has_data(last):
        _finish(last, Outcome("refused", "it was stopped before it had data, or they were erased"))
        return None
    return _Run(last, begun.period)


def _has_data(run: Path) -> bool:
    """Whether they were collected, and not erased since."""
    file = run / RUN_DATA
    return file.exists() and file.stat().st_size > 0


def _finish(folder: Path, outcome: Outcome) -> None:
    """Note how a run ended, and forget the tokens and weights that it no longer needs."""
    content = json.dumps(msgspec.to_builtins(outcome), indent=1) + "\n"
    (folder / RUN_DATA).unlink(missing_ok=True)
    training = folder / "training"
    for path in (*training.glob("state.pt*"), *training.glob("drafter*"), *training.glob("best*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    replace(folder / OUTCOME, content.encode())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TrainingError(f"a training run is under way already in {folder}; wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(descriptor)

"""The gate: whether a candidate may serve.

Whole sessions that training did not see are replayed teacher-forced through the old and the new drafter at one fixed
block length; accept counts and the engine's cost table give goodput. A candidate is promoted if it is shown to be
better on new traffic and shown to keep the anchor sessions; falling loss promotes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from redraft.engine.drafters.loading import check, load_config, version_of
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.cost import CostTable
from redraft.engine.types import Capabilities, DrafterVersion, Stratum
from redraft.feedback.drift.reference import Reference, make_reference
from redraft.retrain.data.sample import Sample
from redraft.retrain.features import CAPTURE_ROWS, PatientCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.gate.measure import Answer, StepCost, measure_drafts, replayed, step_costs
from redraft.retrain.gate.parity import check_parity
from redraft.retrain.gate.report import (
    ANCHORS,
    LOOPING,
    NEW_TRAFFIC,
    Comparison,
    Leak,
    Report,
    SessionRow,
    compare,
    session_rows,
)
from redraft.retrain.gate.seen import TrainingRecord
from redraft.retrain.gate.statistics import level_of
from redraft.retrain.gate.verdict import Evidence, decide
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.replay import AcceptCounts, ModelReplay, NgramReplay
from redraft.retrain.trainer import Progress, at_once, silent

MAX_SET_ASIDE = 0.5
"""Share of judging sessions whose answers training may have seen under other names before the split is at fault."""


def judge(
    gate: Iterable[Sample],
    anchors: Iterable[Sample],
    *,
    old: Path | None,
    new: Path,
    target: FrozenTarget,
    costs: CostTable,
    engine: Callable[[Path], tuple[EngineCore, Capabilities]],
    seen: TrainingRecord,
    block_length: int,
    config: GateConfig,
    look: int = 1,
    stratum: Callable[[Sample, int], Stratum] | None = None,
    between: Callable[[], None] = at_once,
    progress: Progress = silent,
) -> Report:
    """Judge the drafter in ``new`` by whole sessions, against the one in ``old`` (None: the floor, n-gram).

    ``gate`` are answers of new traffic and ``anchors`` of what must not be lost: greedy, without penalties, bias or
    grammar; sampled and overlong ones are counted as unusable. ``engine`` makes an idle engine that serves the drafter
    in a folder, as `build_core` does. ``seen`` is what ``new`` and its ancestors learnt from. ``look`` counts the tests
    of this series, from 1; later ones are held to more. ``stratum``, of a sample and a context bucket, gives the report
    references for drift. ``between`` is called before each pass that reads features: it may wait there, or raise.
    Raises `DrafterError` if a folder holds no drafter of the target, `TrainingError` if ``costs`` lacks the old one's.
    """
    folders = [new] if old is None else [old, new]
    for folder in folders:
        check(folder, target.target.config, target.identity)
    judging = {NEW_TRAFFIC: list(gate), ANCHORS: list(anchors)}
    level = level_of(config.alpha, look)
    block_length = min(block_length, *(load_config(folder).block_size - 1 for folder in folders))
    kept, leak, leaked, unusable = _eligible(judging, seen, target.target.config.context_length)
    old_version = NgramDrafter.version if old is None else version_of(old)
    new_version = version_of(new)
    report = Report(
        verdict=decide(Evidence(leaked=leaked), config),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target.identity,
        old=old_version,
        new=new_version,
        block_length=block_length,
        look=look,
        level=level,
        config=config.model_dump(),
        gate_hash=_hash(kept[NEW_TRAFFIC]),
        anchor_hash=_hash(kept[ANCHORS]),
        costs_hash=hashlib.sha256(msgspec.json.encode(costs)).hexdigest(),
        unusable=unusable,
        leak=leak,
    )
    if leaked is not None or not any(kept.values()):
        return report
    context = round(median(len(sample.token_ids) for samples in kept.values() for sample in samples))
    draft_cost = measure_drafts(old, new, target, context=context, sequences=config.sequences)
    prices = step_costs(costs, old_version, draft_cost)
    answers = _replay_all(kept, old, new, target, prices, block_length, between, progress)
    rows = [row for kind in answers for row in session_rows(kind, answers[kind])]
    found = _comparisons(rows, level, config)
    core, can = engine(new)
    parity = check_parity(core, can.lossless, _for_parity(answers, config), block_length, config.parity_tolerance)
    new_traffic, kept_anchors, looping = (found.get(name) for name in (NEW_TRAFFIC, ANCHORS, LOOPING))
    evidence = Evidence(
        sessions=new_traffic.sessions if new_traffic else 0,
        anchor_sessions=kept_anchors.sessions if kept_anchors else 0,
        gain=new_traffic.gain if new_traffic else None,
        tau_gain=new_traffic.tau_gain if new_traffic else None,
        anchor_gain=kept_anchors.gain if kept_anchors else None,
        looping_gain=looping.gain if looping else None,
        parity=parity.wrong,
        parity_checked=parity.reproduced > 0,
    )
    return msgspec.structs.replace(
        report,
        verdict=decide(evidence, config),
        draft_cost=draft_cost,
        parity=parity,
        new_traffic=new_traffic,
        anchors=kept_anchors,
        looping=looping,
        groups=tuple(each for name, each in found.items() if name not in (NEW_TRAFFIC, ANCHORS, LOOPING)),
        sessions=tuple(rows),
        references=() if stratum is None else tuple(_references(answers[NEW_TRAFFIC], stratum, new_version)),
    )


def _eligible(
    judging: dict[str, list[Sample]], seen: TrainingRecord, context_length: int
) -> tuple[dict[str, list[Sample]], Leak, str | None, int]:
    """Samples that may judge, by kind; which sessions may not; whether that spoils the test; and unusable samples."""
    everything = [sample for samples in judging.values() for sample in samples]
    sessions = {sample.session for sample in everything}
    named = {sample.session for sample in everything if seen.names(sample)}
    repeated = {sample.session for sample in everything if seen.repeats(sample)} - named
    kept = {
        kind: [
            sample
            for sample in samples
            if sample.greedy and len(sample.token_ids) <= context_length and sample.session not in named | repeated
        ]
        for kind, samples in judging.items()
    }
    leaked = None
    if named:
        leaked = f"training saw {len(named)} of the {len(sessions)} sessions that were to judge the candidate"
    elif len(repeated) > MAX_SET_ASIDE * len(sessions):
        leaked = f"training saw, under other names, answers of {len(repeated)} of the {len(sessions)} judging sessions"
    unusable = sum(not sample.greedy or len(sample.token_ids) > context_length for sample in everything)
    return kept, Leak(named=tuple(sorted(named)), set_aside=tuple(sorted(repeated))), leaked, unusable


def _replay_all(
    kept: dict[str, list[Sample]],
    old: Path | None,
    new: Path,
    target: FrozenTarget,
    prices: tuple[StepCost, StepCost],
    block_length: int,
    between: Callable[[], None],
    progress: Progress,
) -> dict[str, list[Answer]]:
    captures: dict[tuple[int, ...], PatientCapture] = {}

    def drafting(folder: Path) -> ModelReplay:
        model = load_model(folder, target.target.device)
        layers = model.config.feature_layers
        captures.setdefault(
            layers, PatientCapture(target.target, layers, CAPTURE_ROWS[target.target.device.type], between)
        )
        return ModelReplay(model, target, captures[layers])

    by_old = NgramReplay(block_length) if old is None else drafting(old)
    by_new = drafting(new)
    total = sum(len(sample.spans) for samples in kept.values() for sample in samples)
    answers: dict[str, list[Answer]] = {kind: [] for kind in kept}
    for kind, samples in kept.items():
        for answer in replayed(samples, by_old, by_new, block_length, *prices):
            answers[kind].append(answer)
            progress(sum(map(len, answers.values())), total, kind)
    return answers


def _comparisons(rows: Sequence[SessionRow], level: float, config: GateConfig) -> dict[str, Comparison]:
    """Old against new by what is compared: the tests' two, looping answers of both, and each source."""
    plain = [row for row in rows if not row.looping]
    parts = {
        NEW_TRAFFIC: [row for row in plain if row.kind == NEW_TRAFFIC],
        ANCHORS: [row for row in plain if row.kind == ANCHORS],
        LOOPING: [row for row in rows if row.looping],
    }
    for row in plain:
        parts.setdefault(f"{row.kind}: {row.group}", []).append(row)
    found = {
        name: compare(name, part, level=level, draws=config.draws, seed=config.seed) for name, part in parts.items()
    }
    return {name: comparison for name, comparison in found.items() if comparison is not None}


def _for_parity(answers: dict[str, list[Answer]], config: GateConfig) -> list[Answer]:
    """The last non-looping answer of a few sessions of new traffic, spread evenly."""
    last: dict[str, Answer] = {}
    for answer in answers[NEW_TRAFFIC]:
        if not answer.looping and answer.new.verify_steps:
            last.setdefault(answer.sample.session, answer)
    found = list(last.values())
    count = min(config.parity_sessions, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def _references(
    answers: Iterable[Answer], stratum: Callable[[Sample, int], Stratum], version: DrafterVersion
) -> Iterable[Reference]:
    """What the new drafter is expected to accept, by stratum with two sessions at least."""
    by_stratum: dict[Stratum, dict[str, AcceptCounts]] = {}
    for answer in answers:
        if not answer.looping:
            session = answer.sample.session
            for bucket, counts in answer.new_by_bucket.items():
                sessions = by_stratum.setdefault(stratum(answer.sample, bucket), {})
                sessions[session] = sessions[session] + counts if session in sessions else counts
    for where, sessions in by_stratum.items():
        if sum(bool(counts.reached[0]) for counts in sessions.values()) >= 2:
            yield make_reference(where, version, [(counts.reached, counts.accepted) for counts in sessions.values()])


def _hash(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in sorted(samples, key=lambda sample: (sample.session, sample.id)):
        digest.update(msgspec.json.encode((sample.session, sample.id, sample.token_ids, sample.spans)))
    return digest.hexdigest()

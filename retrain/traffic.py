"""From what serving captured to what a drafter learns from and is judged by, split by session and time.

A *period* begins at ``since``: when traffic began to drift, or when the last run ended. A *cut* in it makes all events
before it older than all after it, and leaves a share of the period's baseline sessions behind it, whole.

| side | sessions | spans |
| --- | --- | --- |
| gate | baseline, begun at the cut or later | whole answers |
| anchor | a fixed share of the baseline sessions that ended before the period; never learnt from, in any run | same |
| replay | a uniform sample of the other sessions that ended before the period, against forgetting | same |
| validation | a fixed share of the period's other sessions; chooses the checkpoint | same |
| train | the rest of the period's sessions, up to the cut | captured spans, and a margin around them |

A session is on one side only, and so is a turn: one that is held out is not learnt from in another session either.
Turns that a grammar, penalties or biases had a part in judge nothing.
Everything is decided by hashes, times and contents, so neither order nor repetition of events matters.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Struct

from redraft.engine.types import is_looping
from redraft.feedback.contexts import ContextStore, TurnContext
from redraft.feedback.events import Event, Reason, SpanEvent
from redraft.retrain.data.sample import Sample
from redraft.retrain.data.splits import Split
from redraft.retrain.traffic_config import TrafficConfig

Side = Literal["gate", "anchor", "validation", "replay", "train"]

SPLIT_OF: dict[Side, Split] = {
    "gate": "gate",
    "anchor": "anchor",
    "validation": "calibrate",
    "replay": "train",
    "train": "train",
}

JUDGING: frozenset[Side] = frozenset({"gate", "anchor"})

REASON_WEIGHT: dict[Reason, float] = {
    "rejected": 1.0,
    "tool_call": 1.0,
    "draft_prob": 0.5,
    "entropy": 0.25,
    "baseline": 0.25,
}
"""What a supervised token weighs by why it was kept; where the target itself is unsure there is less to learn."""


class TrafficData(Struct, frozen=True, kw_only=True):
    """One run's data. All that is learnt from is older than ``cut``, all that ``gate`` holds is not.

    ``left_out`` counts turns by why nothing came of them. ``begun`` are sessions that began before the cut, ``learnt``
    the digests of turns that are learnt from or chosen by.
    """

    target: str
    cut: float
    train: tuple[Sample, ...]
    replay: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    gate: tuple[Sample, ...]
    anchor: tuple[Sample, ...]
    left_out: dict[str, int]
    begun: frozenset[str]
    learnt: frozenset[bytes]

    @property
    def digest(self) -> str:
        """SHA-256 of what is learnt from and chosen by."""
        used = [(each.id, each.spans, each.weight) for each in (*self.train, *self.replay, *self.validation)]
        return hashlib.sha256(msgspec.json.encode(used)).hexdigest()


class _Kept(Struct, frozen=True):
    """A span that was kept, or with ``reason`` None only the turn."""

    time: float
    context: str | None
    constrained: bool
    start: int = 0
    end: int = 0
    reason: Reason | None = None
    probability: float = 1.0


@dataclass(slots=True)
class _Session:
    tenant: str
    agent_type: str
    name: str
    baseline: float | None = None
    """The probability with which it was drawn, if it was."""
    kept: set[_Kept] = field(default_factory=set)

    @property
    def first(self) -> float:
        return min(kept.time for kept in self.kept)

    @property
    def last(self) -> float:
        return max(kept.time for kept in self.kept)

    @property
    def contexts(self) -> set[str]:
        return {kept.context for kept in self.kept if kept.context}

    def before(self, cut: float) -> _Session:
        kept = {kept for kept in self.kept if kept.time < cut}
        return _Session(self.tenant, self.agent_type, self.name, self.baseline, kept)

    def place(self, purpose: str) -> float:
        """Uniform in [0, 1), the same in every run."""
        digest = hashlib.blake2b(f"{purpose}\0{self.name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, slots=True)
class _Turn:
    context: TurnContext
    id: str
    digest: bytes
    looping: bool
    spans: Sequence[tuple[int, int, float]]
    """Supervised, with their weights; they may overlap."""


def collect(
    events: Iterable[Event], contexts: ContextStore, *, target: str, since: float, config: TrafficConfig
) -> TrafficData:
    """The data of a run for the target of that identity, from all events that are kept.

    Turns of a session that begin one another become one sample, so that their features are made once. A supervised
    token weighs `REASON_WEIGHT` of why its span was kept, over the probability of keeping it (up to ``weight_cap``);
    the largest counts where spans overlap. A sample's weight is the mean over its supervised tokens; those of replay
    are scaled together to ``replay_share`` of all draws.
    """
    left_out: Counter[str] = Counter()
    sessions = _sessions(events, target, left_out)
    cut = _cut(sessions, since, config.gate_share)
    sides: dict[Side, list[_Session]] = defaultdict(list)
    for session in sessions:
        if session.first >= cut:
            if session.baseline is not None:
                sides["gate"].append(session)
            else:
                left_out["after the cut"] += len(session.contexts)
            continue
        past = session.last < since
        if session.baseline is not None and session.place("anchor") < config.anchor_share:
            if past:
                sides["anchor"].append(session)
            else:
                left_out["a later run's anchor"] += len(session.contexts)
            continue
        held = not past and session.place("validation") < config.validation_share
        before = session.before(cut)
        left_out["after the cut"] += len(session.contexts - before.contexts)
        sides["replay" if past else "validation" if held else "train"].append(before)

    reader = _Reader(contexts, target, config, left_out)
    samples: dict[Side, tuple[Sample, ...]] = {}
    digests: set[bytes] = set()
    held_out: set[bytes] = set()
    for side in SPLIT_OF:
        samples[side], found = reader.read(side, sides[side], held_out)
        if side in JUDGING:
            held_out |= found
        else:
            digests |= found
            held_out |= found if side == "validation" else set()
    return TrafficData(
        target=target,
        cut=cut,
        train=samples["train"],
        replay=_mixed(samples["replay"], samples["train"], config.replay_share),
        validation=samples["validation"],
        gate=samples["gate"],
        anchor=samples["anchor"],
        left_out=dict(sorted((+left_out).items())),
        begun=frozenset(session.name for session in sessions if session.first < cut),
        learnt=frozenset(digests),
    )


def with_later_gate(
    data: TrafficData, events: Iterable[Event], contexts: ContextStore, config: TrafficConfig
) -> TrafficData:
    """The same with every gate session that there is by now; ``events`` are at least all from the cut on."""
    left_out: Counter[str] = Counter()
    later = [
        session
        for session in _sessions(events, data.target, left_out)
        if session.baseline is not None and session.first >= data.cut and session.name not in data.begun
    ]
    gate, _ = _Reader(contexts, data.target, config, left_out).read("gate", later, data.learnt)
    return msgspec.structs.replace(data, gate=gate)


def _sessions(events: Iterable[Event], target: str, left_out: Counter[str]) -> list[_Session]:
    sessions: dict[str, _Session] = {}
    foreign = set()
    for event in events:
        origin = event.origin
        if origin.target != target:
            foreign.add(event.context)
            continue
        session = sessions.setdefault(origin.session, _Session(origin.tenant, origin.agent_type, origin.session))
        session.agent_type = min(session.agent_type, origin.agent_type)
        if isinstance(event, SpanEvent):
            baseline = event.reason == "baseline"
            span = (event.start, event.end, event.reason, event.probability)
            session.kept.add(_Kept(event.time, event.context, event.constrained, *span))
        else:
            baseline = event.baseline
            session.kept.add(_Kept(event.time, event.context, event.constrained))
        if baseline:
            session.baseline = min(session.baseline or 1.0, event.probability)
    left_out["another target"] += len(foreign - {None})
    return sorted(sessions.values(), key=lambda session: (session.first, session.name))


def _cut(sessions: Sequence[_Session], since: float, gate_share: float) -> float:
    """The start of the first session to judge by; after everything, where there is none."""
    starts = sorted(session.first for session in sessions if session.baseline is not None and session.first >= since)
    judges = round(gate_share * len(starts))
    if judges:
        return starts[-judges]
    return math.nextafter(max((session.last for session in sessions), default=since), math.inf)


@dataclass(frozen=True, slots=True)
class _Reader:
    contexts: ContextStore
    target: str
    config: TrafficConfig
    left_out: Counter[str]

    def read(
        self, side: Side, sessions: Sequence[_Session], not_these: set[bytes] | frozenset[bytes]
    ) -> tuple[tuple[Sample, ...], set[bytes]]:
        """The sessions' samples, without turns of those digests, and the digests of the others."""
        chosen = sorted(sessions, key=lambda session: session.place("sample"))
        most = self.config.judging_sessions if side in JUDGING else self.config.sessions
        for session in chosen[most:]:
            self.left_out["more than wanted"] += len(session.contexts)
        samples: list[Sample] = []
        digests: set[bytes] = set()
        for session in chosen[:most]:
            turns = [
                turn for turn in self._turns(side, session) if self._kept(turn.digest not in not_these, "held out")
            ]
            digests |= {turn.digest for turn in turns}
            samples += _samples(side, session, turns)
        return tuple(sorted(samples, key=lambda sample: sample.id)), digests

    def _turns(self, side: Side, session: _Session) -> Iterable[_Turn]:
        spans: dict[str, list[_Kept]] = defaultdict(list)
        for kept in session.kept:
            if kept.context:
                spans[kept.context].append(kept)
        for name in sorted(spans):
            context = self.contexts.get(session.tenant, name)
            if context is None:
                self.left_out["missing"] += 1
                continue
            size, prompt = len(context.token_ids), context.prompt_tokens
            looping = is_looping(context.token_ids[prompt:])
            judges = side in JUDGING
            if not (
                self._kept(context.target == self.target, "another target")
                and self._kept(size - prompt > 1, "too short")
                and self._kept(size <= self.config.max_tokens, "too long")
                and self._kept(judges or not looping, "looping")
                and self._kept(not judges or not _steered(context, spans[name]), "steered")
            ):
                continue
            weighted = self._supervised(session, context, spans[name]) if side == "train" else [(prompt, size, 1.0)]
            if self._kept(bool(weighted), "no span"):
                digest = hashlib.blake2b(array("I", context.token_ids).tobytes(), digest_size=16).digest()
                yield _Turn(context, name, digest, looping, weighted)

    def _kept(self, keep: bool, otherwise: str) -> bool:
        self.left_out[otherwise] += not keep
        return keep

    def _supervised(
        self, session: _Session, context: TurnContext, kept: Iterable[_Kept]
    ) -> list[tuple[int, int, float]]:
        size, prompt, margin = len(context.token_ids), context.prompt_tokens, self.config.margin
        if session.baseline is not None:
            return [(prompt, size, self._weight("baseline", session.baseline))]
        spans = []
        for each in kept:
            start, end = max(each.start - margin, prompt), min(each.end + margin, size)
            if each.reason and each.start < each.end and end - start > 1:
                spans.append((start, end, self._weight(each.reason, each.probability)))
        return spans

    def _weight(self, reason: Reason, probability: float) -> float:
        cap = self.config.weight_cap
        return REASON_WEIGHT[reason] * (min(1 / probability, cap) if probability > 0 else cap)


def _steered(context: TurnContext, kept: Iterable[_Kept]) -> bool:
    """Whether a grammar, penalties or biases had a part in the answer, which replay does not know of."""
    sampling = context.sampling
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    return any(each.constrained for each in kept) or bool(sampling.logit_bias) or penalties != (0.0, 0.0, 1.0)


def _samples(side: Side, session: _Session, turns: Iterable[_Turn]) -> Iterable[Sample]:
    """Turns from the last to the first, each joined to the one after it if that goes on from its tokens."""
    chains: list[list[_Turn]] = []
    for turn in sorted(turns, key=lambda turn: (-len(turn.context.token_ids), turn.id)):
        chain = next((chain for chain in chains if _goes_on(turn, chain[-1])), None)
        if chain is None:
            chains.append([turn])
        else:
            chain.append(turn)
    for chain in chains:
        spans, weight = _union([span for turn in chain for span in turn.spans])
        yield Sample(
            id=chain[0].id,
            source=session.agent_type,
            family=session.tenant,
            split=SPLIT_OF[side],
            session=session.name,
            token_ids=chain[0].context.token_ids,
            spans=spans,
            greedy=chain[0].context.sampling.mode == "greedy",
            looping=chain[0].looping,
            weight=weight,
        )


def _goes_on(turn: _Turn, later: _Turn) -> bool:
    size = len(turn.context.token_ids)
    return (
        turn.looping == later.looping
        and turn.context.sampling.mode == later.context.sampling.mode
        and size < later.context.prompt_tokens
        and later.context.token_ids[:size] == turn.context.token_ids
    )


def _union(spans: Iterable[tuple[int, int, float]]) -> tuple[tuple[tuple[int, int], ...], float]:
    """Disjoint spans over the same tokens, and the mean over these of the largest weight.

    Spans of different answers never touch: a prompt's own tokens lie between them.
    """
    weights: dict[int, float] = {}
    for start, end, weight in spans:
        for token in range(start, end):
            weights[token] = max(weights.get(token, 0.0), weight)
    tokens = sorted(weights)
    starts = [token for token in tokens if token - 1 not in weights]
    ends = [token + 1 for token in tokens if token + 1 not in weights]
    return tuple(zip(starts, ends, strict=True)), math.fsum(weights.values()) / len(weights)


def _mixed(replay: Sequence[Sample], train: Sequence[Sample], share: float) -> tuple[Sample, ...]:
    """Replay with weights that make it ``share`` of all draws."""
    of_train, of_replay = (math.fsum(sample.weight for sample in side) for side in (train, replay))
    if not of_replay or not share:
        return ()
    factor = share / (1 - share) * of_train / of_replay if of_train else 1.0
    return tuple(msgspec.structs.replace(sample, weight=sample.weight * factor) for sample in replay)

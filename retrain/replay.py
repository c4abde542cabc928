"""Teacher-forced replay: what accept length a drafter would have had on recorded greedy answers.

A drafter drafts at every block start of an answer at once; then the answer is walked as serving would have: from a
block start past the drafted tokens that the answer confirms, and one more, to the next. Prefill samples an answer's
first token, so that one is not counted; the last, end token or not, is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from msgspec import Struct

from redraft.engine.drafters.base import DraftSequence
from redraft.engine.drafters.lookup import SuffixIndex
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.types import AcceptLength
from redraft.retrain.blocks import block_starts
from redraft.retrain.data.sample import Sample
from redraft.retrain.features import Capture, FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.base import DraftModel


class AcceptCounts(Struct, frozen=True):
    """Sums over verify steps; adding two of one block length pools them.

    ``reached`` and ``accepted`` are by position from 1: verify steps in which all before it were accepted and it was
    verified and not past the answer's end, and those in which it was accepted too.
    """

    committed: int
    verify_steps: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def length(self) -> AcceptLength:
        return AcceptLength(self.committed, self.verify_steps)

    @property
    def hazard(self) -> tuple[float | None, ...]:
        return tuple(a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True))

    def __add__(self, other: AcceptCounts) -> AcceptCounts:
        return AcceptCounts(
            self.committed + other.committed,
            self.verify_steps + other.verify_steps,
            tuple(map(sum, zip(self.reached, other.reached, strict=True))),
            tuple(map(sum, zip(self.accepted, other.accepted, strict=True))),
        )


Proposals = Callable[[int], Sequence[int]]
"""The tokens drafted at a block start of one sample."""


class ReplayStep(NamedTuple):
    """One verify step of a walk: ``compared`` of its ``block_length`` drafted tokens are not past the answer's end."""

    position: int
    block_length: int
    compared: int
    accepted: int
    committed: int


def steps(sample: Sample, proposals: Proposals, block_length: int) -> Iterator[ReplayStep]:
    """The verify steps of a sample's spans, each of at most ``block_length`` drafted tokens."""
    tokens = sample.token_ids
    for start, end in sample.spans:
        position = start
        while position < end - 1:
            drafted = proposals(position)[:block_length]
            left = end - 1 - position
            compared = min(len(drafted), left)
            accepted = next((k for k in range(compared) if drafted[k] != tokens[position + k + 1]), compared)
            committed = min(accepted + 1, left)
            yield ReplayStep(position, len(drafted), compared, accepted, committed)
            position += committed


def count(walked: Iterable[ReplayStep], block_length: int) -> AcceptCounts:
    """Sums over steps of at most ``block_length`` drafted tokens."""
    committed = verify_steps = 0
    reached, accepted = [0] * block_length, [0] * block_length
    for step in walked:
        committed += step.committed
        verify_steps += 1
        for k in range(min(step.accepted + 1, step.compared)):
            reached[k] += 1
        for k in range(step.accepted):
            accepted[k] += 1
    return AcceptCounts(committed, verify_steps, tuple(reached), tuple(accepted))


def walk(sample: Sample, proposals: Proposals, block_length: int) -> AcceptCounts:
    """What verifying at most ``block_length`` drafted tokens a step would have committed of a sample's spans."""
    return count(steps(sample, proposals, block_length), block_length)


class Drafting(Protocol):
    """Drafts at every block start of a sample; ``longest`` bounds how many tokens."""

    longest: int

    def __call__(self, sample: Sample) -> Proposals: ...


class ModelReplay:
    """Proposals of a trained model at every block start, as long as its blocks are.

    ``capture`` makes features of the model's feature layers; None makes them anew for every sample.
    """

    def __init__(self, model: DraftModel, target: FrozenTarget, capture: Capture | None = None) -> None:
        self._model = model
        self._target = target
        self._capture = capture or FeatureCapture(target.target, model.config.feature_layers)
        self.longest = model.config.block_size - 1

    @torch.inference_mode()
    def __call__(self, sample: Sample) -> Proposals:
        starts = block_starts(sample.spans)[:, 0]
        if not len(starts):
            return lambda start: ()
        read = sample.token_ids[: int(starts.max()) + 1]
        (captured,) = self._capture([read])
        device = captured.features.device
        ids = torch.tensor(read, device=device)
        drafted = self._model.proposals(captured.features, ids, starts.to(device), self._target)
        by_start = dict(zip(starts.tolist(), drafted, strict=True))
        return lambda start: by_start[start]


class NgramReplay:
    """The floor at every block start, in order: its index only grows. ``longest`` bounds what it proposes."""

    def __init__(self, longest: int) -> None:
        self._drafter = NgramDrafter()
        self.longest = longest

    def __call__(self, sample: Sample) -> Proposals:
        index = SuffixIndex()
        by_start: dict[int, Sequence[int]] = {}
        for start in block_starts(sample.spans)[:, 0].tolist():
            sequence = DraftSequence(sample.token_ids[: start + 1], self.longest, index=index)
            by_start[start] = self._drafter.propose([sequence])[0].tokens
        return lambda start: by_start[start]


class Replayed(Struct, frozen=True):
    """Counts of one sample by block length."""

    sample: Sample
    counts: dict[int, AcceptCounts]


def replay(
    samples: Iterable[Sample],
    drafter: Callable[[Sample], Proposals],
    block_lengths: Sequence[int],
) -> Iterator[Replayed]:
    """Replay greedy samples; others are passed over, for their tokens are not what verification would compare with."""
    for sample in samples:
        if sample.greedy:
            proposals = drafter(sample)
            yield Replayed(sample, {length: walk(sample, proposals, length) for length in block_lengths})


def pooled(replayed: Iterable[Replayed], key: Callable[[Sample], str]) -> dict[str, dict[int, AcceptCounts]]:
    """Counts by group and block length; looping answers are in no group but ``looping``."""
    groups: dict[str, dict[int, AcceptCounts]] = {}
    for each in replayed:
        group = groups.setdefault("looping" if each.sample.looping else key(each.sample), {})
        for length, counts in each.counts.items():
            group[length] = group[length] + counts if length in group else counts
    return groups

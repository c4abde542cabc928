"""What a candidate has learnt from, and which sessions that rules out as its judges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from redraft.retrain.data.sample import Sample

RUN = 64
"""Tokens of a run that two conversations share only if one repeats the other: user text and answer, not a template."""


class TrainingRecord(Struct, frozen=True):
    """Sessions and samples that training saw, and hashes of the token runs that end in what was learnt from.

    The record of a fine-tuned drafter is its own and its ancestors', joined by ``|``.
    """

    sessions: frozenset[str] = frozenset()
    samples: frozenset[str] = frozenset()
    runs: frozenset[int] = frozenset()

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> TrainingRecord:
        kept = list(samples)
        return cls(
            frozenset(sample.session for sample in kept),
            frozenset(sample.id for sample in kept),
            frozenset(run for sample in kept for run in runs(sample)),
        )

    def __or__(self, other: TrainingRecord) -> TrainingRecord:
        return TrainingRecord(self.sessions | other.sessions, self.samples | other.samples, self.runs | other.runs)

    def names(self, sample: Sample) -> bool:
        """Whether training saw this very sample or another of its session."""
        return sample.session in self.sessions or sample.id in self.samples

    def repeats(self, sample: Sample) -> bool:
        """Whether most of what the sample would be judged by was learnt from, under whatever name."""
        found = [run in self.runs for run in runs(sample)]
        return sum(found) * 2 > len(found)


def runs(sample: Sample) -> Iterator[int]:
    """A hash for each supervised token: of it and the up to 63 before it."""
    tokens = np.asarray(sample.token_ids, dtype="<u4")
    for start, end in sample.spans:
        for last in range(start, end):
            run = tokens[max(last + 1 - RUN, 0) : last + 1]
            yield int.from_bytes(hashlib.blake2b(run.tobytes(), digest_size=7).digest())

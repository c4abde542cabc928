"""What passes cost on the loaded target, drafter by drafter, timed where they are paid.

Nothing of it is seen in the cache: passes run over K/V of their own, as much as the longest context measured takes,
which the sequences of a pass share where it is too little for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import torch

from redraft.engine.drafters.base import Drafter, DraftSequence, TargetRows
from redraft.engine.embedded.attention import Segment, arena_slots
from redraft.engine.embedded.cache import pages
from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.cost import CostGrid, CostTable
from redraft.engine.types import DrafterVersion

CONTEXTS = (512, 2048, 8192)
ROWS = (1, 2, 4, 8, 16, 32, 64)
REPETITIONS = 5
VERIFY_SECONDS = 2.5
DRAFT_SECONDS = 0.5
"""What a grid may take, about: where passes take long there are fewer repetitions, then fewer contexts."""

FILL = 0.01
"""What K/V is filled with, so that it takes memory as real K/V does."""

Measuring = Iterator[CostGrid | None]
"""None after every pass, so that whoever comes meanwhile waits for one pass, and at last the grid."""


class CostMeter:
    """Measures the target of a core and its loaded drafters, one pass each time it is told to `advance`.

    A verify pass is timed with its logits and their arg-max; its rows are blocks of as many sequences as they fill. A
    draft is a block for each sequence, and the draft K/V of as many rows.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        longest = min(core.max_tokens_per_request, CONTEXTS[-1])
        self._contexts = (*(context for context in CONTEXTS if context < longest), longest)
        self._block = min(core.block_size, self._contexts[0])
        self._verify: CostGrid | None = None
        self._drafts: dict[DrafterVersion, CostGrid] = {}
        self._measuring: tuple[DrafterVersion | None, Measuring] | None = None

    @property
    def table(self) -> CostTable | None:
        """Costs known so far, of the drafters that are loaded; None before the target's are."""
        if self._verify is None:
            return None
        loaded = self._core.versions.loaded
        draft = {version.id: grid for version, grid in self._drafts.items() if version in loaded}
        return CostTable(verify=self._verify, draft=draft)

    def advance(self) -> bool:
        """Run one more pass of what has not been measured; False if all has been. For when there is nothing to run."""
        loaded = self._core.versions.loaded
        if self._measuring is not None and self._measuring[0] not in (None, *loaded):
            self._measuring = None
        if self._measuring is None:
            missing = next((version for version in loaded if version not in self._drafts), None)
            if self._verify is None:
                self._measuring = None, self._measure_verify()
            elif missing is not None:
                self._measuring = missing, self._measure_draft(loaded[missing])
            else:
                return False
        version, measuring = self._measuring
        grid = next(measuring)
        if grid is not None:
            self._measuring = None
            if version is None:
                self._verify = grid
            else:
                self._drafts[version] = grid
        return True

    def _measure_verify(self) -> Measuring:
        target = self._core.target
        kv = target.new_kv(pages(self._contexts[-1])).fill_(FILL)

        def verify(context: int, rows: int) -> None:
            widths = [min(self._block, rows - row) for row in range(0, rows, self._block)]
            segments = self._segments(context, widths)
            positions = torch.cat([torch.arange(context - width, context) for width in widths]).to(target.device)
            hidden, _ = target.forward(torch.zeros_like(positions), positions, segments, kv)
            target.logits(hidden).argmax(-1).tolist()

        most = self._core.max_running * self._block
        return _timed(verify, self._contexts, [rows for rows in ROWS if rows <= most], VERIFY_SECONDS)

    def _measure_draft(self, drafter: Drafter) -> Measuring:
        target = self._core.target
        counts = [count for count in ROWS if count <= self._core.max_running]
        kv = drafter.new_kv(pages(self._contexts[-1]))
        if kv is not None:
            kv.fill_(FILL)
        width = len(drafter.feature_layers) * target.config.hidden
        features = torch.zeros(counts[-1] * self._block, width, dtype=target.dtype, device=target.device)
        batches = {context: self._sequences(context, counts[-1]) for context in self._contexts}

        def draft(context: int, count: int) -> None:
            positions = torch.arange(context - self._block, context, device=target.device).repeat(count)
            segments = self._segments(context, [self._block] * count)
            rows = TargetRows(
                features=features[: len(positions)],
                tokens=positions % target.config.vocab,
                positions=positions,
                slots=arena_slots(positions, segments),
                segments=segments,
                windows=[0] * count,
            )
            kept, drafter.kv = drafter.kv, kv
            try:
                drafter.propose(batches[context][:count])
                drafter.materialise(rows)
            finally:
                drafter.kv = kept
            if target.device.type == "cuda":
                torch.cuda.synchronize()

        return _timed(draft, self._contexts, counts, DRAFT_SECONDS)

    def _sequences(self, context: int, count: int) -> list[DraftSequence]:
        """Sequences that end a block before ``context``, without repetitions for n-gram to find."""
        tokens = [token % self._core.target.config.vocab for token in range(context - self._block + 1)]
        sequences = [
            DraftSequence(tokens, length=self._block - 1, slot=segment.slot, room=self._block)
            for segment in self._segments(context, [self._block] * count)
        ]
        for sequence in sequences:
            sequence.index.find(tokens)
        return sequences

    def _segments(self, context: int, widths: Sequence[int]) -> list[Segment]:
        """One sequence for each width, whose last rows end at ``context``."""
        size = pages(context)
        places = pages(self._contexts[-1]) // size
        starts = [sum(widths[:index]) for index in range(len(widths))]
        return [
            Segment(start, width, index % places * size, context - width)
            for index, (start, width) in enumerate(zip(starts, widths, strict=True))
        ]


def _timed(
    run: Callable[[int, int], None], contexts: Sequence[int], counts: Sequence[int], seconds: float
) -> Measuring:
    """Medians of ``run(context, count)``, taken in turn, all counts of one context after another, for ``seconds``."""
    samples: dict[int, list[list[float]]] = {}
    spent = 0.0
    for count in counts:
        if spent < seconds:
            spent += _seconds(run, contexts[0], count)
            yield None
    for context in (*contexts,) * REPETITIONS:
        if samples and spent > seconds:
            break
        times = []
        for count in counts:
            times.append(_seconds(run, context, count))
            yield None
        samples.setdefault(context, []).append(times)
        spent += sum(times)
    rows = [tuple(1e3 * median(column) for column in zip(*times, strict=True)) for times in samples.values()]
    yield CostGrid(tuple(samples), tuple(counts), tuple(rows))


def _seconds(run: Callable[[int, int], None], context: int, count: int) -> float:
    started = perf_counter()
    run(context, count)
    return perf_counter() - started

"""The K/V arena and the prefixes kept in it.

A sequence, running or idle, owns one contiguous range of arena slots. Idle sequences are the prefix cache: a new prompt
takes over the idle sequence it continues, or copies the longest prefix it shares with any sequence of its namespace.
The arena is the byte budget; nothing is allocated outside it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Tensor

from redraft.engine.types import DrafterVersion, shared_length

PAGE = 64
"""Slots are handed out in multiples of this, so that keys padded to 64 stay inside their sequence's range."""

HASH_BLOCK = 16

MAX_CANDIDATES = 8
"""Sequences compared token by token for one prompt, latest first."""


def new_kv(layers: int, slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """K/V storage [layers, slots, heads, head_dim], zero; on a CPU it takes memory only where it is written."""
    shape = (layers, slots, heads, head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    integer = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, dtype=integer)).view(dtype)


def pages(slots: int) -> int:
    """``slots`` rounded up to whole pages, in slots."""
    return -(-slots // PAGE) * PAGE


class Arena:
    """First-fit allocator of contiguous slot ranges."""

    def __init__(self, slots: int) -> None:
        self.slots = slots // PAGE * PAGE
        self._free: list[tuple[int, int]] = [(0, self.slots)]

    @property
    def free_slots(self) -> int:
        return sum(size for _, size in self._free)

    def allocate(self, size: int) -> int | None:
        for index, (start, available) in enumerate(self._free):
            if available >= size:
                rest = [(start + size, available - size)] if available > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def free(self, start: int, size: int) -> None:
        if size == 0:
            return
        index = bisect(self._free, (start, size))
        if index < len(self._free) and start + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start, before = self._free.pop(index)
            size += before
        self._free.insert(index, (start, size))

    def grow(self, start: int, size: int, more: int) -> bool:
        """Extend the range [start, start + size) in place; False if its neighbour is taken."""
        index = bisect(self._free, (start + size, 0))
        if index == len(self._free) or self._free[index][0] != start + size or self._free[index][1] < more:
            return False
        free_start, available = self._free[index]
        self._free[index : index + 1] = [(free_start + more, available - more)] if available > more else []
        return True


@dataclass(slots=True, eq=False)
class CachedSequence:
    """K/V of ``tokens`` in slots [start, start + capacity); position i is slot ``start + i``.

    Draft K/V stands beside it from position ``draft_start`` on, written by the version ``drafter`` if any.
    """

    namespace: str
    start: int
    capacity: int
    tokens: list[int] = field(default_factory=list)
    running: bool = True
    used: int = 0
    hashes: list[int] = field(default_factory=list)
    drafter: DrafterVersion | None = None
    draft_start: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)


class PrefixCache:
    """Finds, hands out, extends and evicts sequences of the arena ``kv`` [layers, slots, heads, head_dim].

    ``draft_kv`` has a store of as many slots for each drafter version in use; what a sequence's version wrote there
    moves along with it.
    """

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        self.draft_kv: dict[DrafterVersion, Tensor] = {}
        self._arena = Arena(kv.shape[1])
        self._idle: dict[int, CachedSequence] = {}
        self._index: dict[tuple[str, int], list[CachedSequence]] = {}
        self._clock = count()

    @property
    def slots(self) -> int:
        return self._arena.slots

    @property
    def used_slots(self) -> int:
        return self._arena.slots - self._arena.free_slots

    def acquire(self, namespace: str, prompt: Sequence[int], capacity: int) -> CachedSequence | None:
        """A running sequence that holds the longest known prefix of ``prompt``, all but its last token at most.

        Idle sequences are evicted, least recently used first, to make room for ``capacity`` slots; None if the
        running ones leave too little, in which case nothing is evicted, or no range that is long enough.
        """
        capacity = pages(capacity)
        if capacity > self._arena.free_slots + sum(sequence.capacity for sequence in self._idle.values()):
            return None
        source, hit = self._longest_prefix(namespace, prompt[:-1])
        if source is None:
            start = self._allocate(capacity)
            return None if start is None else CachedSequence(namespace, start, capacity)
        idle = not source.running
        if idle:
            del self._idle[source.used]
        if idle and source.length - hit < HASH_BLOCK:
            self._truncate(source, hit)
            if self._resize(source, capacity):
                source.running = True
                return source
        elif (start := self._allocate(capacity)) is not None:
            if idle:
                source.used = next(self._clock)
                self._idle[source.used] = source
            sequence = CachedSequence(
                namespace, start, capacity, drafter=source.drafter, draft_start=min(source.draft_start, hit)
            )
            self._copy(source, start, hit)
            self.extend(sequence, prompt[:hit])
            return sequence
        if not idle:
            return None
        self._drop(source)
        return self.acquire(namespace, prompt, capacity)

    def extend(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Record that the K/V of these further tokens is in place."""
        sequence.tokens.extend(tokens)
        for block in range(len(sequence.hashes), sequence.length // HASH_BLOCK):
            previous = sequence.hashes[-1] if sequence.hashes else 0
            value = _chain(previous, sequence.tokens[block * HASH_BLOCK : (block + 1) * HASH_BLOCK])
            sequence.hashes.append(value)
            self._index.setdefault((sequence.namespace, value), []).append(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Keep a sequence's prefix for later and give back the slots beyond it."""
        sequence.running = False
        if sequence.length < HASH_BLOCK:
            self._drop(sequence)
            return
        kept = pages(sequence.length)
        self._arena.free(sequence.start + kept, sequence.capacity - kept)
        sequence.capacity = kept
        sequence.used = next(self._clock)
        self._idle[sequence.used] = sequence

    def drop_draft_kv(self, version: DrafterVersion) -> None:
        """Forget the draft K/V of a version that no running sequence has, if there is any."""
        self.draft_kv.pop(version, None)
        for sequence in self._idle.values():
            if sequence.drafter == version:
                sequence.drafter = None

    def share_draft_kv(self, sequence: CachedSequence) -> int:
        """Take over the draft K/V before ``draft_start`` that other sequences have of the same version and tokens.

        Only hash blocks' borders are looked at, and only where one more token is alike, on which a row's draft K/V may
        depend. Returned is the border down to which the rest would have to be made for more to be found, 0 if there is
        none.
        """
        border = sequence.draft_start // HASH_BLOCK * HASH_BLOCK
        while border > 0:
            donor = self._draft_donor(sequence, border)
            if donor is None:
                border -= HASH_BLOCK
            elif border < sequence.draft_start:
                return border
            else:
                assert sequence.drafter is not None, "who has draft K/V has a version"
                begin, store = donor.draft_start, self.draft_kv[sequence.drafter]
                rows = store[:, donor.start + begin : donor.start + border]
                store[:, sequence.start + begin : sequence.start + border] = rows
                sequence.draft_start = begin
                border = begin // HASH_BLOCK * HASH_BLOCK
        return 0

    def idle(self) -> Iterator[CachedSequence]:
        """Sequences that nobody runs, latest used first."""
        return reversed(self._idle.values())

    def _longest_prefix(self, namespace: str, prompt: Sequence[int]) -> tuple[CachedSequence | None, int]:
        candidates: list[CachedSequence] = []
        value = 0
        for block in range(len(prompt) // HASH_BLOCK):
            value = _chain(value, prompt[block * HASH_BLOCK : (block + 1) * HASH_BLOCK])
            found = self._index.get((namespace, value))
            if not found:
                break
            candidates = found
        lengths = [
            (shared_length(sequence.tokens, prompt), sequence) for sequence in candidates[: -MAX_CANDIDATES - 1 : -1]
        ]
        hit, best = max(lengths, key=lambda item: (item[0], not item[1].running), default=(0, None))
        return best, hit

    def _allocate(self, capacity: int) -> int | None:
        while (start := self._arena.allocate(capacity)) is None:
            if not self._idle:
                return None
            self._drop(self._idle.pop(min(self._idle)))
        return start

    def _resize(self, sequence: CachedSequence, capacity: int) -> bool:
        more = capacity - sequence.capacity
        if more > 0 and not self._arena.grow(sequence.start, sequence.capacity, more):
            start = self._allocate(capacity)
            if start is None:
                return False
            self._copy(sequence, start, sequence.length)
            self._arena.free(sequence.start, sequence.capacity)
            sequence.start = start
        sequence.capacity = max(capacity, sequence.capacity)
        return True

    def _truncate(self, sequence: CachedSequence, length: int) -> None:
        for value in sequence.hashes[length // HASH_BLOCK :]:
            self._forget(sequence, value)
        del sequence.hashes[length // HASH_BLOCK :]
        del sequence.tokens[length:]
        sequence.draft_start = min(sequence.draft_start, length)

    def _drop(self, sequence: CachedSequence) -> None:
        self._truncate(sequence, 0)
        self._arena.free(sequence.start, sequence.capacity)

    def _forget(self, sequence: CachedSequence, value: int) -> None:
        key = (sequence.namespace, value)
        holders = self._index[key]
        holders.remove(sequence)
        if not holders:
            del self._index[key]

    def _draft_donor(self, sequence: CachedSequence, end: int) -> CachedSequence | None:
        """Who has the most draft K/V of the sequence's version and tokens up to ``end``, a hash block's border."""
        holders = self._index.get((sequence.namespace, sequence.hashes[end // HASH_BLOCK - 1]), ())
        donors = [each for each in holders if each.drafter == sequence.drafter and each.draft_start < end]
        donor = min(donors, key=lambda each: each.draft_start, default=None)
        wanted = min(end + 1, sequence.length)
        return donor if donor is None or shared_length(donor.tokens, sequence.tokens) >= wanted else None

    def _copy(self, source: CachedSequence, start: int, length: int) -> None:
        draft_kv = self.draft_kv.get(source.drafter) if source.drafter else None
        for store in (self._kv,) if draft_kv is None else (self._kv, draft_kv):
            store[:, start : start + length] = store[:, source.start : source.start + length]


def _chain(previous: int, block: Sequence[int]) -> int:
    return hash((previous, *block))

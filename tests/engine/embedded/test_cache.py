from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.engine.embedded.cache import HASH_BLOCK, PAGE, Arena, CachedSequence, PrefixCache, pages

pytestmark = pytest.mark.unit


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "grow"]), st.integers(1, 5)), max_size=80))
def test_arena_ranges_never_overlap_and_all_free_space_comes_back(steps: list[tuple[str, int]]) -> None:
    arena = Arena(16 * PAGE)
    held: list[tuple[int, int]] = []
    for action, size in steps:
        if action == "allocate":
            start = arena.allocate(size * PAGE)
            if start is not None:
                held.append((start, size * PAGE))
        elif held and action == "free":
            arena.free(*held.pop(size % len(held)))
        elif held:
            start, length = held[size % len(held)]
            if arena.grow(start, length, PAGE):
                held[size % len(held)] = (start, length + PAGE)
        taken = sorted(held)
        assert all(start + length <= after for (start, length), (after, _) in pairwise(taken))
        assert arena.free_slots == arena.slots - sum(length for _, length in held)
    for start, length in held:
        arena.free(start, length)
    assert arena.allocate(arena.slots) == 0


class Filled:
    """A prefix cache whose K/V at a slot is a function of the tokens before it, so that wrong reuse shows."""

    def __init__(self, slots: int) -> None:
        self.kv = torch.zeros(2, slots, 2, 4, dtype=torch.float64)
        self.cache = PrefixCache(self.kv)

    def run(self, namespace: str, prompt: list[int], capacity: int) -> CachedSequence | None:
        sequence = self.cache.acquire(namespace, prompt, capacity)
        if sequence is not None:
            self.check(sequence, prompt)
            for position in range(sequence.length, len(prompt)):
                self.kv[:, sequence.start + position] = self.value(prompt[: position + 1])
            self.cache.extend(sequence, prompt[sequence.length :])
        return sequence

    def check(self, sequence: CachedSequence, prompt: list[int]) -> None:
        assert sequence.tokens == prompt[: sequence.length]
        assert sequence.length < len(prompt)
        for position in range(sequence.length):
            assert bool((self.kv[:, sequence.start + position] == self.value(prompt[: position + 1])).all())

    @staticmethod
    def value(prefix: list[int]) -> float:
        return float(hash(tuple(prefix)) % 1_000_003)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda bits: [b for b in bits for _ in range(30)])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), prompts, st.integers(0, 3)), max_size=25))
def test_reused_kv_always_belongs_to_the_same_prefix_of_the_same_tenant(
    requests: list[tuple[str, list[int], int]],
) -> None:
    filled = Filled(12 * PAGE)
    running: list[CachedSequence] = []
    for namespace, prompt, keep in requests:
        tagged = [ord(namespace), *prompt]
        sequence = filled.run(namespace, tagged, len(tagged) + 20)
        if sequence is not None:
            running.append(sequence)
        while len(running) > keep:
            filled.cache.release(running.pop(0))
        assert sum(s.capacity for s in running) <= filled.cache.used_slots <= filled.cache.slots
        ranges = sorted((s.start, s.capacity) for s in running)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))


def test_the_next_turn_takes_over_its_own_sequence_without_a_copy() -> None:
    filled = Filled(8 * PAGE)
    first = filled.run("t", list(range(100)), 128)
    assert first is not None
    filled.cache.release(first)
    second = filled.run("t", list(range(150)), 200)
    assert second is first
    assert second.capacity >= 200


def test_a_prefix_is_shared_with_a_sequence_that_still_runs() -> None:
    filled = Filled(8 * PAGE)
    first = filled.run("t", list(range(100)), 128)
    second = filled.cache.acquire("t", [*range(90), 7, 7], 128)
    assert first is not None
    assert second is not None
    assert second.length == 90
    assert second.start != first.start


def test_tenants_never_see_each_others_prefixes() -> None:
    filled = Filled(8 * PAGE)
    first = filled.run("a", list(range(100)), 128)
    assert first is not None
    filled.cache.release(first)
    other = filled.cache.acquire("b", list(range(100)), 128)
    assert other is not None
    assert other.length == 0


def test_the_least_recently_used_idle_sequence_goes_first() -> None:
    filled = Filled(6 * PAGE)
    for tag in (1, 2, 3):
        sequence = filled.run("t", [tag] * (2 * PAGE - 1), 2 * PAGE)
        assert sequence is not None
        filled.cache.release(sequence)
    assert filled.run("t", [4] * (2 * PAGE - 1), 2 * PAGE) is not None
    for tag, known in ((1, False), (3, True)):
        prompt = [tag] * (2 * PAGE - 1)
        _, hit = filled.cache._longest_prefix("t", prompt)
        assert bool(hit) is known


def test_a_prefix_that_others_copy_counts_as_used() -> None:
    filled = Filled(6 * PAGE)
    for tag in (1, 2):
        sequence = filled.run("t", [tag] * 120, 2 * PAGE)
        assert sequence is not None
        filled.cache.release(sequence)
    assert filled.run("t", [1] * 60 + [3] * 60, 2 * PAGE) is not None
    assert filled.run("t", [4] * 120, 2 * PAGE) is not None
    assert [filled.cache._longest_prefix("t", [tag] * 120)[1] for tag in (1, 2)] == [120, 0]


def test_a_request_that_has_to_wait_evicts_nobody() -> None:
    filled = Filled(4 * PAGE)
    idle, running = filled.run("t", [1] * 100, 2 * PAGE), filled.run("t", [2] * 100, 2 * PAGE)
    assert idle is not None
    assert running is not None
    filled.cache.release(idle)
    assert filled.cache.acquire("t", [3] * 100, 3 * PAGE) is None
    again = filled.cache.acquire("t", [1] * 100, 2 * PAGE)
    assert again is not None
    assert again.length == 99


def test_running_sequences_are_never_evicted() -> None:
    filled = Filled(4 * PAGE)
    first = filled.run("t", [1] * 100, 4 * PAGE)
    assert first is not None
    assert filled.cache.acquire("t", [2] * 10, PAGE) is None
    filled.cache.release(first)
    assert filled.cache.acquire("t", [2] * 10, PAGE) is not None


def test_an_idle_prefix_never_blocks_the_request_that_would_reuse_it() -> None:
    filled = Filled(4 * PAGE)
    first = filled.run("t", list(range(3 * PAGE)), 3 * PAGE)
    assert first is not None
    filled.cache.release(first)
    forked = [*range(2 * PAGE), *[999] * PAGE]
    assert filled.run("t", forked, 4 * PAGE) is not None


def test_release_gives_back_the_slots_beyond_the_prefix() -> None:
    filled = Filled(16 * PAGE)
    sequence = filled.run("t", list(range(HASH_BLOCK * 2)), 10 * PAGE)
    assert sequence is not None
    filled.cache.release(sequence)
    assert filled.cache.used_slots == pages(HASH_BLOCK * 2)

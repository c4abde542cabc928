"""Drafters are swapped while requests run: no answer changes, and nothing of an old version stays behind."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path

import pytest
import torch

from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.cache import HASH_BLOCK
from redraft.engine.embedded.core import BUSY_ROWS, PREFILL_ROWS, EngineCore
from redraft.engine.embedded.model import Target
from redraft.engine.protocol import RequestRefused
from redraft.engine.types import (
    Commit,
    DrafterPointer,
    DrafterVersion,
    GenerationRequest,
    SamplingParams,
    SpeculationScope,
    VerifyStep,
)

from .conftest import VERSION, answers, load_target, run
from .test_core import SAMPLINGS, mixed_requests, request

pytestmark = pytest.mark.unit
MakeCore = Callable[..., EngineCore]
MakeDrafter = Callable[..., Drafter]

NEWER = DrafterVersion("dflash", "newer")
THIRD = DrafterVersion("dflash", "third")
EAGLE = DrafterVersion("eagle3", "fourth")
NGRAM = NgramDrafter.version
EVERYTHING = SpeculationScope("all")
SWAPS = 200
SESSIONS = 8
TURNS = 6


def point(serving: DrafterVersion, token: int = 0, previous: DrafterVersion | None = None) -> DrafterPointer:
    return DrafterPointer(target="tiny", serving=serving, previous=previous, token=token)


@pytest.fixture
def four(make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch) -> list[Drafter]:
    """Two drafters of a kind that read different layers, one that reads none, and one of another kind."""
    monkeypatch.setattr("redraft.engine.embedded.core.LEAST_SURVIVAL", 0.0)
    newer = make_drafter(seed=1, version=NEWER, feature_layers=(1,))
    return [make_drafter(), newer, NgramDrafter(), make_drafter(seed=2, version=EAGLE)]


class Session:
    """Greedy or sampled turns, each on top of the one before."""

    def __init__(self, name: int) -> None:
        rng = random.Random(name)
        self.name = name
        self.prompt = [rng.randrange(256) for _ in range(rng.randrange(20, 60))]
        self.turn = 0
        self.answers: list[list[int]] = []

    def next(self) -> GenerationRequest | None:
        if self.turn == TURNS:
            return None
        self.turn += 1
        self.answers.append([])
        return request(
            f"{self.name}.{self.turn}",
            self.prompt,
            max_tokens=20 + (7 * self.name + self.turn) % 23,
            sampling=SAMPLINGS[self.name % len(SAMPLINGS)],
        )

    def take(self, commit: Commit) -> bool:
        """Whether that ended the turn."""
        self.answers[-1] += commit.token_ids
        if commit.finish_reason:
            self.prompt += [*self.answers[-1], self.turn]
        return commit.finish_reason is not None


def play(core: EngineCore, between: Callable[[], None]) -> tuple[list[Session], dict[str, list[VerifyStep]]]:
    """All turns of all sessions at once; every pass must commit something for every sequence that decodes."""
    sessions = {str(name): Session(name) for name in range(SESSIONS)}
    steps: dict[str, list[VerifyStep]] = defaultdict(list)
    for session in sessions.values():
        core.submit(session.next())
    while core.running or core.waiting:
        between()
        decoding = {each.request.request_id for each in core.running if not each.prefilling}
        commits = core.step()
        assert decoding <= {commit.request_id for commit in commits}, "a swap held somebody up"
        for commit in commits:
            assert commit.finish_reason != "abort"
            if commit.verify_step is not None:
                steps[commit.request_id].append(commit.verify_step)
            session = sessions[commit.request_id.split(".")[0]]
            if session.take(commit) and (following := session.next()):
                core.submit(following)
    return list(sessions.values()), steps


def test_200_swaps_under_8_sessions_change_no_answer_and_leave_nothing_behind(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    plain, _ = play(make_core(NgramDrafter()), lambda: None)
    versions = [DrafterVersion(kind, str(number)) for number, kind in enumerate(["dflash", "eagle3"] * 3)]
    drafters = [make_drafter(seed, version) for seed, version in enumerate(versions)]
    following = cycle([*drafters, NgramDrafter()])
    core = make_core(next(following), max_running=SESSIONS)
    token = 0

    def swap() -> None:
        nonlocal token
        if token == SWAPS:
            return
        token += 1
        drafter = next(following)
        previous = core.drafter.version if core.drafter else None
        core.versions.add(drafter)
        core.activate(point(drafter.version, token, previous))
        in_use = {each.drafter.version for each in core.running if each.drafter}
        named = {drafter.version, previous}
        assert set(core.versions.loaded) == in_use | named | {NGRAM}
        assert set(core.cache.draft_kv) == {each for each in in_use | {drafter.version} if each != NGRAM}
        holding = {version for version, each in core.versions.loaded.items() if each.kv is not None}
        assert holding == set(core.cache.draft_kv)

    rounds = 0
    while token < SWAPS:
        swapped, steps = play(core, swap)
        assert [session.answers for session in swapped] == [session.answers for session in plain]
        for own in steps.values():
            assert len({step.drafter for step in own if step.drafter != NGRAM}) <= 1, (
                "of one version from first to last"
            )
        rounds += 1
    assert rounds < 5
    assert len(core.cache.draft_kv) <= 1
    assert len(core.versions.loaded) <= 3


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("switching", [False, True], ids=["on", "switching"])
def test_answers_do_not_depend_on_swaps(
    make_core: MakeCore, four: list[Drafter], sampling: SamplingParams, switching: bool
) -> None:
    """Versions with different feature layers share passes; the kill switch does not get in the way."""
    expected = answers(run(make_core(), mixed_requests(sampling, speculation=False)))
    core = make_core(four[0], max_running=3)
    order = cycle(four)
    for each in mixed_requests(sampling):
        core.submit(each)
    commits: list[Commit] = []
    token = 0
    while core.running or core.waiting:
        token += 1
        drafter = next(order)
        core.versions.add(drafter)
        core.activate(point(drafter.version, token))
        core.set_speculation(EVERYTHING, on=not (switching and token % 3 == 0))
        commits += core.step()
    assert answers(commits) == expected
    assert {VERSION, NEWER, NGRAM, EAGLE} <= {commit.verify_step.drafter for commit in commits if commit.verify_step}


def drafted(core: EngineCore, name: str) -> list[tuple[DrafterVersion | None, tuple[int, ...]]]:
    commits = run(core, [request(name, [(7 * index) % 250 for index in range(50)] * 2)])
    return [(commit.verify_step.drafter, commit.verify_step.drafted) for commit in commits if commit.verify_step]


@pytest.mark.parametrize("into", [0, 1, 2, 3], ids=["dflash", "dflash of other layers", "ngram", "eagle3"])
def test_what_was_swapped_in_drafts_as_if_it_had_been_there_from_the_start(
    make_core: MakeCore, four: list[Drafter], make_drafter: MakeDrafter, into: int
) -> None:
    """An update that does not reach what drafts shows here (sgl-project/sglang#27718, #35403)."""
    expected = drafted(make_core(four[into]), "r")
    assert {drafter for drafter, _ in expected} == {four[into].version}
    core = make_core(make_drafter(seed=2, version=THIRD))
    assert drafted(core, "r") != expected
    core.versions.add(four[into])
    core.activate(point(four[into].version, 1, THIRD))
    while core.rematerialise():
        pass
    assert drafted(core, "r") == expected
    core.activate(point(THIRD, 2))
    assert {drafter for drafter, _ in drafted(core, "undone")} <= {THIRD, NGRAM}


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        (point(NEWER, token=4), "pointer 4 is out of date: 5 is in force"),
        (point(DrafterVersion("dflash", "unknown"), token=6), "dflash unknown is not loaded; load it from its folder"),
        (DrafterPointer(target="other", serving=NEWER, token=6), "for the target other; this engine serves tiny"),
    ],
    ids=["fenced", "not loaded", "another target"],
)
def test_a_pointer_that_cannot_be_followed_is_refused_and_changes_nothing(
    make_core: MakeCore, four: list[Drafter], pointer: DrafterPointer, message: str
) -> None:
    core = make_core(four[0])
    core.versions.add(four[1])
    core.activate(point(VERSION, token=5, previous=NEWER))
    with pytest.raises(RequestRefused, match=message):
        core.activate(pointer)
    assert core.drafter is four[0]
    core.activate(point(VERSION, token=5, previous=NEWER))
    core.activate(point(NEWER, token=6))
    assert core.drafter is four[1]


def test_a_version_loaded_again_while_it_runs_is_the_one_that_runs(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    core = make_core(make_drafter())
    core.submit(request("r"))
    core.step()
    core.activate(point(NGRAM))
    core.versions.add(make_drafter())
    core.activate(point(VERSION))
    assert core.drafter is core.running[0].drafter


PROMPT = [(7 * index) % 250 for index in range(PREFILL_ROWS + 100)]


@pytest.mark.parametrize(
    ("invariant", "dtype"),
    [(True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)],
    ids=["invariant", "tolerant", "tolerant, in fp32"],
)
def test_an_idle_prefix_gets_the_new_versions_draft_kv_piece_by_piece(
    make_core: MakeCore,
    make_drafter: MakeDrafter,
    tiny_checkpoint: Path,
    tiny_target: Target,
    invariant: bool,
    dtype: torch.dtype,
) -> None:
    """And the target's K/V keeps its bits; in invariant mode because they come out again, without being put back."""
    target = tiny_target if invariant else load_target(tiny_checkpoint, dtype=dtype, invariant=False)
    original = make_drafter(version=NEWER, target=target)
    core = make_core(original, target=target)
    run(core, [request("r", PROMPT)])
    (sequence,) = core.cache.idle()
    kept = slice(sequence.start, sequence.start + sequence.length)
    assert original.kv is not None
    expected = original.kv[:, kept].clone()

    swapped = make_drafter(version=NEWER, target=target)
    core = make_core(make_drafter(seed=1, target=target), target=target)
    run(core, [request("r", PROMPT)])
    core.versions.add(swapped)
    core.activate(point(NEWER))
    (sequence,) = core.cache.idle()
    target_kv = core._kv.clone()
    starts = []
    while core.rematerialise():
        starts.append((sequence.drafter, sequence.draft_start))
    assert starts == [(NEWER, sequence.length - PREFILL_ROWS), (NEWER, 0)]
    assert torch.equal(core._kv, target_kv)
    assert swapped.kv is not None
    found = swapped.kv[:, kept]
    if invariant:
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    error = (found - expected).float().abs().mean()
    assert error < 0.01 * expected.float().abs().mean(), "how far single ones are off in bf16 is the processor's matter"
    assert expected.abs().mean() > 0.1


def test_what_recomputes_an_idle_prefix_wrongly_is_caught(
    make_core: MakeCore, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a piece is computed one position off, so that other bits would stand in the target's K/V."""
    core = make_core(make_drafter())
    run(core, [request("r", PROMPT)])
    core.versions.add(make_drafter(seed=1, version=NEWER))
    core.activate(point(NEWER))
    before = core._kv.clone()
    forward = Target.forward
    monkeypatch.setattr(
        Target, "forward", lambda self, tokens, positions, *rest: forward(self, tokens.roll(1), positions, *rest)
    )
    core.rematerialise()
    assert not torch.equal(core._kv, before)


def test_the_latest_used_prefix_is_first_and_one_with_a_grown_window_goes_on_where_it_was(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    core = make_core(make_drafter())
    for name, first in (("older", 1), ("latest", 2)):
        run(core, [request(name, [first, *PROMPT])])
    core.versions.add(make_drafter(seed=1, version=NEWER))
    core.activate(point(NEWER))
    latest, older = core.cache.idle()
    core.rematerialise()
    assert (latest.drafter, older.drafter) == (NEWER, None)
    grown = latest.draft_start
    core.submit(request("again", [*latest.tokens, 5, 6, 7]))
    core.step()
    assert (core.running[0].kv, latest.draft_start) == (latest, grown)
    core.abort("again")
    core.rematerialise()
    assert (latest.draft_start, older.drafter) == (max(0, grown - PREFILL_ROWS), None)


def test_what_idle_prefixes_have_in_common_is_computed_once(
    make_core: MakeCore, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform's sessions share instructions and tools, of which the cache holds a copy for each."""
    drafter = make_drafter(seed=1, version=NEWER)
    core = make_core(make_drafter())
    for name in range(3):
        run(core, [request(f"{name}", [*PROMPT[:200], *[name + 1] * 20])])
    core.versions.add(drafter)
    core.activate(point(NEWER))
    rows = []
    forward = Target.forward

    def counting(self: Target, tokens: torch.Tensor, *rest: object) -> object:
        rows.append(len(tokens))
        return forward(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward", counting)
    while core.rematerialise():
        pass
    sequences = list(core.cache.idle())
    common = 200 // HASH_BLOCK * HASH_BLOCK
    assert [each.draft_start for each in sequences] == [0, 0, 0]
    once_more = 1  # between the two pieces of the first, for the row before it
    assert sum(rows) == sum(each.length for each in sequences) - 2 * common + once_more
    assert drafter.kv is not None
    first, *others = (drafter.kv[:, each.start : each.start + common] for each in sequences)
    assert first.abs().mean() > 0.1
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("invariant", [True, False])
def test_an_engine_that_is_never_idle_makes_draft_kv_again_a_few_rows_in_each_pass(
    make_core: MakeCore,
    make_drafter: MakeDrafter,
    tiny_checkpoint: Path,
    tiny_target: Target,
    invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a prefix that all sessions share would be drafted for by n-gram, or without its tools, until the night."""
    target = tiny_target if invariant else load_target(tiny_checkpoint, invariant=False)
    prompt = [*PROMPT, 1, 2, 3]
    expected = answers(run(make_core(target=target), [request("next", prompt, max_tokens=40)]))
    core = make_core(make_drafter(), target=target)
    run(core, [request("r", PROMPT)])
    core.versions.add(make_drafter(seed=1, version=NEWER))
    core.activate(point(NEWER))
    core.submit(request("next", prompt, max_tokens=40))
    starts, commits, passes = [], [], []
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda *given: passes.append(len(commits)) or forward(*given))
    while core.running or core.waiting:
        commits += core.step()
        starts += [running.kv.draft_start for running in core.running]
    assert starts[0] == len(PROMPT)
    assert max(one - other for one, other in pairwise(starts)) == BUSY_ROWS
    assert starts[-1] == 0
    assert len(passes) == len(set(passes)), "a step took more than one pass"
    if invariant:
        assert answers(commits) == expected


def test_a_prefix_that_was_given_draft_kv_while_idle_is_drafted_for_at_once(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    first = []
    for idle in (False, True):
        core = make_core(make_drafter())
        run(core, [request("r", PROMPT[:100])])
        core.versions.add(make_drafter(seed=1, version=NEWER))
        core.activate(point(NEWER))
        while idle and core.rematerialise():
            pass
        commits = run(core, [request("next", [*PROMPT[:100], 1, 2, 3], max_tokens=2)])
        assert commits[0].cached_tokens == 100
        first.append(next(commit.verify_step.drafter for commit in commits if commit.verify_step))
    assert first == [NGRAM, NEWER]


def test_nothing_is_recomputed_for_a_drafter_that_reads_no_features(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    core = make_core(make_drafter())
    run(core, [request("r", PROMPT)])
    core.activate(point(NGRAM))
    assert not core.rematerialise()


def test_draft_kv_goes_with_its_last_sequence_and_weights_stay_for_an_undo(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    old, new = make_drafter(), make_drafter(seed=1, version=NEWER)
    core = make_core(old)
    core.submit(request("r", max_tokens=8))
    core.step()
    core.versions.add(new)
    core.activate(point(NEWER, 1, previous=VERSION))
    assert old.kv is not None
    run(core, [])
    assert old.kv is None
    assert set(core.cache.draft_kv) == {NEWER}
    core.activate(point(VERSION, 2))
    assert set(core.cache.draft_kv) == {VERSION}
    assert set(core.versions.loaded) == {VERSION, NGRAM}

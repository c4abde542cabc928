"""Trained drafters inside the engine: their K/V follows the target's, and answers never depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redraft.engine.drafters.base import Drafter, DraftSequence
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.core import MIN_DRAFT_WINDOW, EngineCore
from redraft.engine.embedded.model import Target
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import (
    DrafterPointer,
    DrafterVersion,
    GenerationRequest,
    SamplingParams,
    SpeculationScope,
    StopConditions,
    VerifyStep,
)

from .conftest import SLOTS, answers, run
from .test_core import SAMPLINGS, mixed_requests

pytestmark = pytest.mark.unit
MakeCore = Callable[..., EngineCore]
MakeDrafter = Callable[..., Drafter]


PARADIGMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "diffusion only": ("dflash", {"injection": False}),
    "injection only": ("dflash", {"autoregressive": True}),
    "eagle3": ("eagle3", {}),
    "eagle3 of 3 layers": ("eagle3", {"layers": 3}),
    "mtp": ("mtp", {}),
}


@pytest.fixture(params=[*PARADIGMS])
def make(
    request: pytest.FixtureRequest, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Drafter]:
    """Drafters of one kind, whose blocks random weights do not cut short."""
    monkeypatch.setattr("redraft.engine.embedded.core.LEAST_SURVIVAL", 0.0)
    kind, shape = PARADIGMS[request.param]
    return lambda seed=0, name="test": make_drafter(seed, DrafterVersion(kind, name), **shape)


def ask(name: str, prompt: list[int], max_tokens: int = 24) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        stopping=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        sampling=SamplingParams(temperature=0.0),
    )


def swap(core: EngineCore, drafter: Drafter) -> None:
    core.versions.add(drafter)
    core.activate(DrafterPointer(target="tiny", serving=drafter.version))


def steps(core: EngineCore, request: GenerationRequest) -> list[VerifyStep]:
    return [commit.verify_step for commit in run(core, [request]) if commit.verify_step]


@pytest.mark.parametrize("block_size", [2, 5, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_answers_do_not_depend_on_the_drafter(
    make_core: MakeCore, make: MakeDrafter, sampling: SamplingParams, block_size: int
) -> None:
    expected = answers(run(make_core(), mixed_requests(sampling, speculation=False)))
    drafter = make()
    core = make_core(drafter, policy=FixedLength(block_size), block_size=block_size, slots=SLOTS)
    commits = run(core, mixed_requests(sampling))
    assert answers(commits) == expected
    verify_steps = [commit.verify_step for commit in commits if commit.verify_step]
    assert any(step.block_length == block_size - 1 for step in verify_steps)
    for step in verify_steps:
        assert step.drafter == drafter.version
        assert step.draft_prob is not None or not step.drafted
        assert all(0 < p <= 1 for p in step.draft_prob or ())


def test_a_prefix_hit_brings_the_draft_kv_along(make_core: MakeCore, make: MakeDrafter) -> None:
    prompt = [(7 * index) % 250 for index in range(100)]
    cold, warm = make(), make()
    for drafter, first in ((cold, [9] * 20), (warm, prompt)):
        core = make_core(drafter, slots=SLOTS)
        run(core, [ask("first", first)])
        core.submit(ask("second", [*prompt, 1, 2, 3]))
        while not core.running or core.running[0].prefilling:
            core.step()
        (sequence,) = core.running
        assert sequence.cached_tokens == (0 if drafter is cold else len(prompt))
        assert sequence.kv.draft_start == 0
        kept = drafter.kv[:, sequence.kv.start : sequence.kv.start + len(prompt) + 3].clone()
        if drafter is cold:
            expected = kept
    torch.testing.assert_close(kept, expected, atol=0.05, rtol=0.05)
    assert expected.abs().mean() > 0.1


def test_draft_kv_of_another_version_is_not_read(make_core: MakeCore, make: MakeDrafter) -> None:
    """The window grows from the hit on, both ways, and n-gram drafts until it is worth attending to."""
    prompt = [(7 * index) % 250 for index in range(100)]
    core, newer = make_core(make(), slots=SLOTS), make(seed=1, name="newer")
    run(core, [ask("first", prompt)])
    swap(core, newer)
    core.submit(ask("second", [*prompt, 1, 2, 3], max_tokens=2 * MIN_DRAFT_WINDOW))
    asked = []
    while core.running or core.waiting:
        windows = [running.kv.length - running.kv.draft_start for running in core.running]
        steps = (commit.verify_step for commit in core.step() if commit.verify_step)
        asked += [(windows[0] >= MIN_DRAFT_WINDOW, step.drafter) for step in steps]
    assert set(asked) == {(False, NgramDrafter.version), (True, newer.version)}


def test_draft_kv_is_written_while_speculation_is_off(make_core: MakeCore, make: MakeDrafter) -> None:
    prompt = [(7 * index) % 250 for index in range(60)]
    everything = SpeculationScope("all")
    drafted = []
    for off in (False, True):
        core = make_core(make(), slots=SLOTS)
        core.set_speculation(everything, not off)
        core.submit(ask("a", prompt, max_tokens=40))
        while not core.running or len(core.running[0].tokens) < len(prompt) + 12:
            core.step()
        core.set_speculation(everything, True)
        later = [commit.verify_step for _ in range(40) if core.running for commit in core.step()]
        drafted.append({step.position: step.drafted for step in later if step})
    common = drafted[0].keys() & drafted[1].keys()
    assert len(common) > 3
    assert all(drafted[0][position] == drafted[1][position] for position in common)


def test_a_block_does_not_read_what_a_rejected_block_left(make_core: MakeCore, make: MakeDrafter) -> None:
    """Scratch K/V of earlier blocks in later slots would change what is drafted."""
    prompt = [(7 * index) % 250 for index in range(60)]
    clean, soiled = make(), make()
    found = []
    for drafter in (clean, soiled):
        core = make_core(drafter, slots=SLOTS)
        core.submit(ask("a", prompt, max_tokens=30))
        proposals = []
        while core.running or core.waiting:
            if drafter is soiled and core.running and not core.running[0].prefilling:
                sequence = core.running[0].kv
                drafter.kv[:, sequence.start + sequence.length : sequence.start + sequence.capacity] = 100.0
            proposals += [commit.verify_step.drafted for commit in core.step() if commit.verify_step]
        found.append(proposals)
    assert found[0] == found[1]


def test_no_block_reaches_past_the_context(make: MakeDrafter, tiny_target: Target) -> None:
    """Slots are handed out in whole pages, so that a sequence may own more than the context has positions."""
    tokens = [1] * (tiny_target.config.context_length - 2)
    (proposal,) = make().propose([DraftSequence(tokens, length=2, room=64)])
    assert len(proposal.tokens) == 2

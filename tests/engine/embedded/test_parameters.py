"""Every parameter at once, in random combinations: speculation must not be able to tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redraft.engine.chat.grammar import GrammarCompiler, json_constraint, tool_call_constraint
from redraft.engine.chat.messages import Tool
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints.identity import identity
from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.model import Target
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import Commit, DrafterVersion, GenerationRequest, SamplingParams, StopConditions

from .conftest import run
from .test_core import ScriptedDrafter

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TOOLS = (Tool("f", None, SCHEMA), Tool("g", None, {"type": "object", "properties": {}, "additionalProperties": False}))
CONSTRAINTS = [json_constraint(SCHEMA), tool_call_constraint(TOOLS, parallel=True)]
TOKEN = st.integers(0, 255)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.8])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.3])),
        top_k=draw(st.sampled_from([0, 1, 5, 200])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=tuple(draw(st.dictionaries(TOKEN, st.sampled_from([-100.0, -2.0, 3.0]), max_size=4)).items()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    constraint = draw(st.none() | st.sampled_from(CONSTRAINTS))
    return GenerationRequest(
        request_id=f"r{draw(st.integers(0, 10**9))}",
        prompt_ids=tuple(draw(st.lists(TOKEN, min_size=1, max_size=80))),
        stopping=StopConditions(
            max_tokens=draw(st.integers(1, 40)),
            strings=tuple(draw(st.lists(st.text("abc{}\"': ", min_size=1, max_size=3), max_size=2))),
            token_ids=tuple(draw(st.lists(TOKEN, max_size=2))),
            ignore_eos=constraint is None and draw(st.booleans()),
        ),
        sampling=draw(samplings()),
        n=draw(st.sampled_from([1, 1, 2])),
        logprobs=draw(st.none() | st.integers(0, 3)),
        constraint=constraint,
    )


@pytest.fixture(scope="module")
def dflash(make_dflash: Callable[..., Path], tiny_checkpoint: Path, tiny_target: Target) -> DFlashDrafter:
    """Of random weights, with as many slots as `make_core`'s cache."""
    folder = make_dflash(tiny_checkpoint, block_size=16)
    return DFlashDrafter(folder, DrafterVersion("dflash", "random"), tiny_target, identity(tiny_checkpoint), 8192)


def outcome(commits: list[Commit]) -> dict[tuple[str, int], Any]:
    """All that a client may see of each choice."""
    seen: dict[tuple[str, int], Any] = {}
    for commit in commits:
        entry = seen.setdefault((commit.request_id, commit.choice), {"ids": [], "logprobs": []})
        entry["ids"] += commit.token_ids
        entry["logprobs"] += commit.logprobs or ()
        entry["finish"] = (commit.finish_reason, commit.text_end)
    return seen


@pytest.mark.unit
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(requests(), min_size=1, max_size=5, unique_by=lambda r: r.request_id),
    st.sampled_from([2, 8, 16]),
    st.data(),
)
def test_speculation_changes_nothing_under_any_parameters(
    make_core: Callable[..., EngineCore],
    dflash: DFlashDrafter,
    batch: list[GenerationRequest],
    block_size: int,
    data: st.DataObject,
) -> None:
    plain = run(make_core(), [as_plain(request) for request in batch])
    expected = outcome(plain)
    prompts = {request.request_id: list(request.prompt_ids) for request in batch}
    truth = [prompts[request_id] + entry["ids"] for (request_id, _), entry in expected.items()]
    wrong = data.draw(st.sampled_from([0.0, 0.3, None]))
    drafter = dflash if wrong is None else ScriptedDrafter(truth, wrong)
    core = make_core(drafter, policy=FixedLength(block_size), block_size=block_size)
    assert outcome(run(core, batch)) == expected
    for request in batch:
        for choice in range(request.n):
            entry = expected[request.request_id, choice]
            assert len(entry["logprobs"]) == (0 if request.logprobs is None else len(entry["ids"]))
            assert len(entry["ids"]) <= request.stopping.max_tokens


def as_plain(request: GenerationRequest) -> GenerationRequest:
    return msgspec.structs.replace(request, speculation=False)


@pytest.mark.unit
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_constrained_answer_is_of_its_grammar_whatever_the_drafter_proposes(
    make_core: Callable[..., EngineCore], temperature: float
) -> None:
    drafter = ScriptedDrafter([], wrong=0.0)
    core = make_core(drafter)
    batch = [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_ids=tuple(range(index, index + 20)),
            stopping=StopConditions(max_tokens=200),
            sampling=SamplingParams(temperature=temperature, seed=index),
            constraint=CONSTRAINTS[0],
        )
        for index in range(8)
    ]
    seen = outcome(run(core, batch))
    for entry in seen.values():
        assert entry["finish"][0] == "stop"
        value = json.loads(core._tokenizer.decode(entry["ids"]))
        assert set(value) == {"kind", "count"}
        assert value["kind"] in ("a", "bc")
        assert 0 <= value["count"] <= 99


@pytest.mark.unit
def test_drafted_tokens_that_break_the_grammar_are_cut_before_verification(
    make_core: Callable[..., EngineCore],
) -> None:
    core = make_core(ScriptedDrafter([], wrong=0.0))
    request = GenerationRequest(
        request_id="r",
        prompt_ids=tuple(range(20)),
        stopping=StopConditions(max_tokens=100),
        sampling=SamplingParams(temperature=0),
        constraint=CONSTRAINTS[0],
    )
    steps = [c.verify_step for c in run(core, [request]) if c.verify_step]
    assert any(step.block_length < len(step.drafted) for step in steps)


@pytest.mark.unit
def test_a_grammar_covers_every_logit_the_target_has(tiny_checkpoint: Path) -> None:
    compiler = GrammarCompiler(Tokenizer.from_folder(tiny_checkpoint), 320)
    assert len(compiler.matcher(CONSTRAINTS[0]).compute_logit_bias()) == 320

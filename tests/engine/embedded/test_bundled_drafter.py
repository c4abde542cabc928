"""The default target with the drafter that comes with it: faster, and not a token different."""

from __future__ import annotations

import pytest

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.grammar import tool_call_constraint
from redraft.engine.chat.messages import Message, Tool
from redraft.engine.checkpoints import DEFAULT_MODEL, resolve
from redraft.engine.config import EngineConfig
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.server import build_core
from redraft.engine.types import AcceptLength, Constraint, GenerationRequest, SamplingParams, StopConditions

from .conftest import answers, run

pytestmark = pytest.mark.integration

TOOL = Tool(
    "get_weather",
    "The weather in a city on a day.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
        "required": ["city"],
    },
)
QUESTIONS = ("What is the weather in Oslo tomorrow?", "Weather in Lima and in Quito, please.", "Write a haiku on rain.")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.3, seed=3)


@pytest.fixture(scope="module")
def cores() -> dict[str, EngineCore]:
    return {name: build_core(EngineConfig(drafter=name, block_size=16))[0] for name in ("none", "dflash")}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    chat = ChatEncoder.from_folder(resolve(DEFAULT_MODEL))
    return [chat.encode_chat([Message("user", question)], [TOOL]) for question in QUESTIONS]


def batch(
    prompts: list[tuple[int, ...]], sampling: SamplingParams, constraint: Constraint | None = None
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=prompt,
            stopping=StopConditions(max_tokens=48),
            sampling=sampling,
            constraint=constraint,
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("sampling", "constraint"),
    [
        (SamplingParams(temperature=0.0), None),
        (SAMPLED, None),
        (SAMPLED, tool_call_constraint([TOOL], parallel=True)),
    ],
    ids=["greedy", "sampled", "constrained"],
)
def test_answers_do_not_depend_on_the_bundled_drafter(
    cores: dict[str, EngineCore],
    prompts: list[tuple[int, ...]],
    sampling: SamplingParams,
    constraint: Constraint | None,
) -> None:
    expected = answers(run(cores["none"], batch(prompts, sampling, constraint)))
    commits = run(cores["dflash"], batch(prompts, sampling, constraint))
    assert answers(commits) == expected
    steps = [commit.verify_step for commit in commits if commit.verify_step]
    assert {step.drafter.kind for step in steps if step.drafter} == {"dflash"}
    assert sum(step.accepted for step in steps) > 0


def test_the_bundled_drafter_drafts_most_of_a_tool_call(
    cores: dict[str, EngineCore], prompts: list[tuple[int, ...]]
) -> None:
    commits = run(cores["dflash"], batch(prompts[:2], SamplingParams(temperature=0.0)))
    accept = AcceptLength()
    for commit in commits:
        if commit.verify_step:
            accept = accept.add_step(commit.verify_step)
    assert accept.tau is not None
    assert accept.tau > 2

"""The main job: multi-turn agent sessions through the official client, with speculation on and nothing lost."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.messages import Message, Tool
from redraft.engine.checkpoints import DEFAULT_MODEL
from redraft.engine.config import EngineConfig
from redraft.engine.embedded import server
from redraft.ops.bench.deployment import running
from redraft.retrain.data.sources.bfcl import AgentSession, sessions

pytestmark = pytest.mark.integration

AT_ONCE = 8
TURNS = 2
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 20}


@dataclass(frozen=True)
class Turn:
    """One answer, whichever way it came: what a client can see of it, and how it was made."""

    text: str
    tool_calls: tuple[tuple[str, str], ...]
    finish_reason: str
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    verified: int


Transcript = list[list[Turn]]


@dataclass(frozen=True)
class Variant:
    sampling: dict[str, Any]
    speculation: bool = True
    stream: bool = False


async def play(
    url: str, scenarios: Sequence[AgentSession], variant: Variant, history: Transcript | None = None
) -> Transcript:
    """Every scenario's turns, 8 scenarios at once; assistant turns come from ``history`` where it is given."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:

        async def one(index: int, scenario: AgentSession) -> list[Turn]:
            async with gate:
                messages: list[dict[str, Any]] = []
                turns = []
                for number, user in enumerate(scenario.turns[:TURNS]):
                    messages.append({"role": "user", "content": user})
                    turn = await ask(client, messages, scenario.tools, variant)
                    turns.append(turn)
                    said = history[index][number] if history else turn
                    messages.append({"role": "assistant", "content": said.text or "(no answer)"})
                return turns

        return await asyncio.gather(*(one(index, scenario) for index, scenario in enumerate(scenarios)))


async def ask(client: AsyncOpenAI, messages: list[Any], tools: Sequence[Tool], variant: Variant) -> Turn:
    arguments: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools],
        "max_tokens": 40,
        "extra_body": {"redraft": {"speculation": variant.speculation, "return_statistics": True}},
        **variant.sampling,
    }
    if not variant.stream:
        completion = await client.chat.completions.create(**arguments)
        choice = completion.choices[0]
        calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
        return turn(choice.message.content or "", calls, choice.finish_reason, completion)
    text, finish, last = "", None, None
    calls_by_index: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    ):
        last = chunk
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                parts = calls_by_index.setdefault(call.index, ["", ""])
                parts[0] += (call.function and call.function.name) or ""
                parts[1] += (call.function and call.function.arguments) or ""
    streamed = tuple((name, args) for _, (name, args) in sorted(calls_by_index.items()))
    return turn(text, streamed, finish, last)


def turn(text: str, calls: tuple[tuple[str, str], ...], finish: str | None, response: Any) -> Turn:
    usage = response.usage
    assert finish is not None
    return Turn(
        text,
        calls,
        finish,
        usage.completion_tokens,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        response.model_extra["redraft"]["verified_tokens"],
    )


def seen(transcript: Transcript) -> list[list[tuple[Any, ...]]]:
    """What must not depend on how an answer was made."""
    return [
        [(t.text, t.tool_calls, t.finish_reason, t.completion_tokens, t.prompt_tokens) for t in turns]
        for turns in transcript
    ]


def short_scenarios(folder: Path, count: int) -> list[AgentSession]:
    """Scenarios whose tools and turns stay under 2K tokens, spread over the classes."""
    chat = ChatEncoder.from_folder(folder)

    def tokens(scenario: AgentSession) -> int:
        messages = [Message(role="user", content=text) for text in scenario.turns[:TURNS]]
        return len(chat.encode_chat(messages, scenario.tools))

    short = [scenario for scenario in sessions() if tokens(scenario) <= 1900]
    return short[:: len(short) // count][:count]


@pytest.fixture(scope="module")
def deployment(default_target: Path) -> Iterator[str]:
    with deployed(server.main) as url:
        yield url


@contextmanager
def deployed(engine_main: Any, drafter: str = "dflash") -> Iterator[str]:
    config = EngineConfig(drafter=drafter)
    with asyncio.Runner() as runner:
        context = running(config, engine_main)
        _, url = runner.run(context.__aenter__())
        try:
            yield url
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_twenty_agent_sessions_answer_the_same_with_and_without_speculation_streamed_and_not(
    deployment: str, default_target: Path, sampling: dict[str, Any]
) -> None:
    scenarios = short_scenarios(default_target, 20)
    assert len(scenarios) == 20
    plain = asyncio.run(play(deployment, scenarios, Variant(sampling, speculation=False)))
    assert all(t.verified == 0 and t.completion_tokens > 0 for turns in plain for t in turns)
    for stream in (False, True):
        drafted = asyncio.run(play(deployment, scenarios, Variant(sampling, stream=stream), plain))
        assert seen(drafted) == seen(plain)
        assert sum(t.verified for turns in drafted for t in turns) > 0
    later = [turns[1] for turns in plain if len(turns) > 1]
    assert all(t.cached_tokens > 0.5 * t.prompt_tokens for t in later), "a second turn reuses the first one's prefix"


@pytest.mark.parametrize(
    ("fault", "sampling"),
    [("order_dependent_noise", SAMPLED), ("trusted_drafts", GREEDY)],
    ids=["sampler", "acceptance"],
)
def test_a_planted_fault_is_caught_by_the_same_comparison(
    default_target: Path, monkeypatch: pytest.MonkeyPatch, fault: str, sampling: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    faults = importlib.import_module("planted_faults")
    scenarios = short_scenarios(default_target, 3)
    with deployed(getattr(faults, fault), drafter="ngram") as url:  # wrong often enough for a fault to show
        plain = asyncio.run(play(url, scenarios, Variant(sampling, speculation=False)))
        drafted = asyncio.run(play(url, scenarios, Variant(sampling), plain))
    assert seen(drafted) != seen(plain)

"""`redraft bench tool-calls`: whether the agent target calls tools where the base does not, and still chats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.checkpoints import resolve
from redraft.engine.config import EngineConfig
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.types import GREEDY, is_looping
from redraft.ops.bench.deployment import running
from redraft.ops.bench.report import envelope, progress, spread
from redraft.retrain.agent_target.data import cases
from redraft.retrain.agent_target.prepared import ABSTAINING, PLAIN_SOURCES, SIMPLE, Case, category_of
from redraft.retrain.agent_target.recipe import BASE, NAME
from redraft.retrain.agent_target.scoring import is_correct, is_valid, looping_share, shares, take_apart
from redraft.retrain.data.conversation import Source
from redraft.retrain.data.generate import EngineResponder
from redraft.retrain.data.prompts import Prompts
from redraft.retrain.data.sources import SOURCES
from redraft.retrain.data.splits import split_of
from redraft.retrain.provenance import present_commit

MODELS = {"base": BASE, "agent": NAME}
MAX_TOKENS = 256
MAX_PROMPT_TOKENS = 2048
AGENT_SOURCES: tuple[Source, ...] = ("bfcl-multi-turn", "airline", "retail")
METHOD = (
    "Both targets through the embedded engine, CPU, greedy, nothing forced, answers of at most 256 tokens to prompts "
    "of at most 2,048. Every prompt is of a test family, which no training reads. Simple cases are BFCL's "
    "simple_python and live_simple: an answer is valid if it holds one call or more, as the gateway parses them, each "
    "of an offered tool with arguments that follow its schema and nothing undeclared; correct if it is BFCL's ground "
    "truth by BFCL's rule. Ground truth itself is valid on 99 % of them. On BFCL's irrelevance cases an answer should "
    "call nothing. Looping shares are of first answers to BFCL multi-turn and airline and retail prompts (agent) and "
    "to instructions, arithmetic and code (plain)."
)


class Asked(Struct, frozen=True):
    """A prompt, where it is from, and what should come of it where that is known."""

    source: Source
    ids: tuple[int, ...]
    case: Case | None = None


def run(*, quick: bool = False) -> dict[str, Any]:
    return asyncio.run(_run(1 if quick else 6))


async def _run(scale: int) -> dict[str, Any]:
    commit = present_commit()
    folders = {kind: resolve(model) for kind, model in MODELS.items()}
    chat = ChatEncoder.from_folder(folders["base"])
    asked = [*_tool_prompts(chat, scale), *_other_prompts(chat, scale)]
    metrics: dict[str, float | None] = {}
    table: list[dict[str, Any]] = []
    for kind, model in MODELS.items():
        async with running(EngineConfig(model=model)) as (engine, _):
            answers = await _answers(engine, asked, model)
        texts = [chat.tokenizer.decode(answer) for answer in answers]
        scored = [(prompt.case, text) for prompt, text in zip(asked, texts, strict=True) if prompt.case]
        loops = [(prompt.source, is_looping(answer)) for prompt, answer in zip(asked, answers, strict=True)]
        found = shares(scored) | looping_share(loops)
        metrics |= {f"{name}_{kind}": value for name, value in found.items()}
        metrics[f"looping_share_{kind}"] = sum(loop for _, loop in loops) / len(loops)
        for prompt, text, (source, loop) in zip(asked, texts, loops, strict=True):
            row = {"model": model, "id": prompt.case.id if prompt.case else None, "source": source, "looping": loop}
            table.append(row | (_verdict(prompt.case, text) if prompt.case else {}))
    return envelope("tool-calls", METHOD, commit, metrics, table)


def _verdict(case: Case, text: str) -> dict[str, bool]:
    answer = take_apart(text)
    if not case.calls:
        return {"calls": bool(answer.calls)}
    return {"valid": is_valid(answer, case.tools), "correct": is_correct(answer, case)}


def _tool_prompts(chat: ChatEncoder, scale: int) -> Iterable[Asked]:
    """Cases of each category, twice as many that call for something."""
    found: dict[str, list[Asked]] = {category: [] for category in (*SIMPLE, *ABSTAINING)}
    for case, conversation in cases(SOURCES["bfcl-single"]()):
        category = category_of(case.id)
        ids = chat.encode_chat(conversation.messages[: conversation.asked_turns[0]], conversation.tools)
        if category in found and len(ids) <= MAX_PROMPT_TOKENS:
            found[category].append(Asked(conversation.source, ids, case))
    for category, prompts in found.items():
        yield from spread(prompts, (10 if category in SIMPLE else 5) * scale)


def _other_prompts(chat: ChatEncoder, scale: int) -> Iterable[Asked]:
    """First prompts of sessions of every source."""
    for source in (*AGENT_SOURCES, *PLAIN_SOURCES):
        sessions = (c for c in SOURCES[source]() if split_of(c.source, c.family) == "test")
        firsts = (next(iter(Prompts(chat, [session])), None) for session in sessions)
        ids = (prompt.ids for prompt in firsts if prompt and len(prompt.ids) <= MAX_PROMPT_TOKENS)
        yield from spread([Asked(source, prompt) for prompt in ids], 4 * scale)


async def _answers(engine: EmbeddedEngine, asked: Sequence[Asked], model: str) -> list[tuple[int, ...]]:
    """Token ids of every answer."""
    responder = EngineResponder(engine)
    places = asyncio.Semaphore(responder.concurrency)
    done = 0

    async def answer(prompt: Asked) -> tuple[int, ...]:
        nonlocal done
        async with places:
            tokens, _ = await responder.respond(prompt.ids, GREEDY, MAX_TOKENS)
        done += 1
        if done % 10 == 0 or done == len(asked):
            progress(f"{model}: {done} of {len(asked)}")
        return tokens

    return await asyncio.gather(*map(answer, asked))

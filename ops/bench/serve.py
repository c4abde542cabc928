"""`redraft bench serve`: the embedded engine against Hugging Face, n-gram against none, and what the gateway adds."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from torch import Tensor

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.messages import Message
from redraft.engine.checkpoints import DEFAULT_MODEL, resolve
from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.config import EngineConfig
from redraft.engine.embedded.attention import Segment
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.embedded.model import Target
from redraft.engine.types import (
    GREEDY,
    AcceptLength,
    GenerationRequest,
    Principal,
    StopConditions,
    is_looping,
)
from redraft.ops.bench.deployment import running
from redraft.ops.bench.report import envelope, progress
from redraft.retrain.data.sources.bfcl import AgentSession, sessions
from redraft.retrain.provenance import present_commit

VERIFY_ROWS = 8
MAX_PROMPT_TOKENS = 2048
METHOD = (
    f"{DEFAULT_MODEL}, bf16, CPU, every core. "
    "Each figure is a ratio of measurements interleaved in one run, taken pair by pair; the median pair is reported, "
    "and the table holds the pairs. Prompts are BFCL multi-turn scenarios with "
    "their tools; both sides of a pair have the same prompt and no pair reuses another's prefix. Tokens per second "
    "are new tokens over wall time, prefill included; decode figures leave out the time to the first token of the "
    "last request. Answers against Hugging Face are greedy and of fixed length. n-gram is compared on whole greedy "
    "answers; looping ones are counted apart and left out of the headline. The invariant mode's cost is the time of "
    "one verify pass of 8 rows a request over the tolerant mode's, median over contexts. What the gateway adds is a "
    "non-streamed chat completion of one token (and of 16, where the engine's own noise is larger than the effect) "
    "over a kept-alive HTTP connection, minus the same token ids sent to the engine's socket."
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One or more answers: their tokens, wall seconds, and seconds to the first token."""

    tokens: int
    seconds: float
    first_token: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        return self.tokens / max(self.seconds - self.first_token, 1e-9)


def run(*, quick: bool = False) -> dict[str, Any]:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    commit = present_commit()
    folder = resolve(DEFAULT_MODEL)
    chat = ChatEncoder.from_folder(folder)
    metrics: dict[str, float | None] = {}
    table: list[dict[str, Any]] = []
    progress("invariant against tolerant")
    metrics["invariant_cost"] = _invariant_cost(folder, table, rounds=10 if quick else 40)
    reference = HuggingFace(folder)
    async with running(EngineConfig()) as (engine, url):
        prompts = [p for session in sessions() if len(p := _prompt(chat, session)) <= MAX_PROMPT_TOKENS]
        await _against_hugging_face(engine, reference, prompts, metrics, table, quick)
        await _ngram(engine, prompts, metrics, table, answers=8 if quick else 40)
        await _gateway(engine, chat, url, metrics, table, pairs=60 if quick else 200)
    return envelope("serve", METHOD, commit, metrics, table)


async def _against_hugging_face(
    engine: EmbeddedEngine,
    reference: HuggingFace,
    prompts: Sequence[tuple[int, ...]],
    metrics: dict[str, float | None],
    table: list[dict[str, Any]],
    quick: bool,
) -> None:
    long = [prompt for prompt in prompts if 1024 <= len(prompt) <= 1536]
    singles = [[prompt] for prompt in prompts[:: len(prompts) // (4 if quick else 12)]]
    batches = [long[start : start + 8] for start in range(0, 8 * (2 if quick else 4), 8)]
    await _ours(engine, singles[0], 8)
    for name, groups, new_tokens in (("1", singles, 96), ("batch8", batches, 64)):
        ratios, decode_ratios = [], []
        for index, group in enumerate(groups):
            progress(f"Hugging Face, {len(group)} at once: {index + 1} of {len(groups)}")

            async def ours(group: Sequence[tuple[int, ...]] = group, tokens: int = new_tokens) -> Timed:
                return await _ours(engine, group, tokens)

            async def theirs(group: Sequence[tuple[int, ...]] = group, tokens: int = new_tokens) -> Timed:
                return await asyncio.to_thread(reference.generate, group, tokens)

            mine, other = await _in_turn(ours, theirs, swap=index % 2 == 1)
            ratios.append(mine.rate / other.rate)
            decode_ratios.append(mine.decode_rate / other.decode_rate)
            table.append(
                {
                    "part": f"nospec_vs_hf_{name}",
                    "prompt_tokens": max(map(len, group)),
                    "ours_tokens_per_s": round(mine.rate, 2),
                    "hf_tokens_per_s": round(other.rate, 2),
                    "ours_decode_tokens_per_s": round(mine.decode_rate, 2),
                    "hf_decode_tokens_per_s": round(other.decode_rate, 2),
                }
            )
        metrics[f"nospec_vs_hf_{name}"] = median(ratios)
        metrics[f"nospec_vs_hf_{name}_decode"] = median(decode_ratios)


async def _in_turn(
    a: Callable[[], Awaitable[Timed]], b: Callable[[], Awaitable[Timed]], *, swap: bool
) -> tuple[Timed, Timed]:
    """Both results; ``swap`` measures b first, so that neither always runs on a warmer machine."""
    if swap:
        second = await b()
        return await a(), second
    return await a(), await b()


async def _ours(engine: EmbeddedEngine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> Timed:
    """All prompts at once, without drafter, each as its own tenant so that no prefix is shared."""
    started = time.perf_counter()
    results = await asyncio.gather(
        *(_answer(engine, prompt, new_tokens, speculation=False, ignore_eos=True) for prompt in prompts)
    )
    seconds = time.perf_counter() - started
    return Timed(
        sum(len(answer.tokens) for answer in results),
        seconds,
        max(answer.first_token_at for answer in results) - started,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    first_token_at: float
    seconds: float
    accept_length: AcceptLength


_request_numbers = count()


async def _answer(
    engine: EmbeddedEngine, prompt: tuple[int, ...], max_tokens: int, *, speculation: bool, ignore_eos: bool = False
) -> Answer:
    number = next(_request_numbers)
    request = GenerationRequest(
        request_id=f"bench-{number}",
        prompt_ids=prompt,
        stopping=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
        sampling=GREEDY,
        speculation=speculation,
        principal=Principal(f"bench-{number}"),
    )
    tokens: list[int] = []
    accept_length = AcceptLength()
    started = time.perf_counter()
    first_token_at = 0.0
    async for commit in engine.generate(request):
        first_token_at = first_token_at or time.perf_counter()
        tokens.extend(commit.token_ids)
        if commit.verify_step is not None:
            accept_length = accept_length.add_step(commit.verify_step)
    return Answer(tokens, first_token_at, time.perf_counter() - started, accept_length)


async def _ngram(
    engine: EmbeddedEngine,
    prompts: Sequence[tuple[int, ...]],
    metrics: dict[str, float | None],
    table: list[dict[str, Any]],
    answers: int,
) -> None:
    pooled = {False: AcceptLength(), True: AcceptLength()}
    ratios: dict[bool, list[float]] = {False: [], True: []}
    chosen = prompts[1 :: max(1, len(prompts) // answers)][:answers]
    for index, prompt in enumerate(chosen):
        progress(f"n-gram: {index + 1} of {len(chosen)}")
        order = (False, True) if index % 2 else (True, False)
        by_speculation = {on: await _answer(engine, prompt, 192, speculation=on) for on in order}
        plain, drafted = by_speculation[False], by_speculation[True]
        looping = is_looping(plain.tokens)
        ratio = plain.seconds / drafted.seconds
        ratios[looping].append(ratio)
        pooled[looping] += drafted.accept_length
        table.append(
            {
                "part": "ngram_vs_nospec_1",
                "prompt_tokens": len(prompt),
                "answer_tokens": len(plain.tokens),
                "equal": plain.tokens == drafted.tokens,
                "looping": looping,
                "speedup": round(ratio, 3),
            }
        )
    metrics["ngram_vs_nospec_1"] = median(ratios[False]) if ratios[False] else None
    metrics["ngram_vs_nospec_1_looping"] = median(ratios[True]) if ratios[True] else None
    metrics["tau_ngram"] = pooled[False].tau
    metrics["tau_ngram_looping"] = pooled[True].tau
    metrics["looping_share"] = len(ratios[True]) / len(chosen)


async def _gateway(
    engine: EmbeddedEngine,
    chat: ChatEncoder,
    url: str,
    metrics: dict[str, float | None],
    table: list[dict[str, Any]],
    pairs: int,
) -> None:
    """What a request costs beyond the bare engine: at one token, where noise is small, and at 16."""
    prompt = "List three facts about the sea."
    ids = chat.encode_chat([Message(role="user", content=prompt)])
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def over_http(max_tokens: int) -> float:
        body = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        content = json.dumps(body | {"messages": [{"role": "user", "content": prompt}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
        started = time.perf_counter()
        writer.write(head.encode() + content)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(headers.partition("content-length: ")[2].split("\r\n")[0]))
        seconds = time.perf_counter() - started
        if not headers.startswith("http/1.1 200"):
            raise RuntimeError(f"the gateway answered {headers.splitlines()[0]}")
        return seconds

    async def bare(max_tokens: int) -> float:
        request = GenerationRequest(
            request_id=f"bare-{next(_request_numbers)}",
            prompt_ids=ids,
            stopping=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            sampling=GREEDY,
        )
        started = time.perf_counter()
        async for _ in engine.generate(request):
            pass
        return time.perf_counter() - started

    for max_tokens, metric in ((1, "gateway_added_p50_ms"), (16, "gateway_added_p50_ms_16_tokens")):
        progress(f"what the gateway adds to {max_tokens} tokens")
        added: list[float] = []
        for index in range(-5, pairs):
            first, second = (over_http, bare) if index % 2 else (bare, over_http)
            one, two = await first(max_tokens), await second(max_tokens)
            difference = (one - two if index % 2 else two - one) * 1e3
            if index >= 0:
                added.append(difference)
        metrics[metric] = median(added)
        low, high = quantiles(added, n=10)[0], quantiles(added, n=10)[-1]
        table.append({"part": metric, "pairs": pairs, "p10_ms": round(low, 3), "p90_ms": round(high, 3)})
    writer.close()


def _invariant_cost(folder: Path, table: list[dict[str, Any]], rounds: int) -> float:
    """Median over contexts of the median ratio of one verify pass, invariant over tolerant, minus 1."""
    torch.set_num_threads(len(_cores()))
    config = load_config(folder)
    device = torch.device("cpu")
    targets = [Target(folder, config, device=device, dtype=torch.bfloat16, invariant=on) for on in (True, False)]
    costs = []
    for requests, context in ((1, 128), (1, 1024), (1, 4096), (8, 1024)):
        stride = context + 64
        kv = targets[0].new_kv(requests * stride)
        kv.normal_(generator=torch.Generator().manual_seed(0))
        segments = [Segment(index * VERIFY_ROWS, VERIFY_ROWS, index * stride, context) for index in range(requests)]
        positions = torch.arange(context, context + VERIFY_ROWS).repeat(requests)
        tokens = torch.randint(config.vocab, positions.shape, generator=torch.Generator().manual_seed(1))
        ratios = []
        for _ in range(rounds + 2):
            invariant, tolerant = (_pass_seconds(target, tokens, positions, segments, kv) for target in targets)
            ratios.append(invariant / tolerant)
        cost = median(ratios[2:]) - 1
        costs.append(cost)
        table.append({"part": "invariant_cost", "requests": requests, "context": context, "cost": round(cost, 4)})
    return median(costs)


def _pass_seconds(target: Target, tokens: Tensor, positions: Tensor, segments: Sequence[Segment], kv: Tensor) -> float:
    started = time.perf_counter()
    target.logits(target.forward(tokens, positions, segments, kv)[0])
    return time.perf_counter() - started


class HuggingFace:
    """`generate` of transformers: bf16, sdpa, left-padded batches, its default cache."""

    def __init__(self, folder: Path) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timed:
        torch.set_num_threads(len(_cores()))
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = _FirstToken()
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        seconds = time.perf_counter() - started
        return Timed((output.shape[1] - width) * len(prompts), seconds, clock.at - started)


class _FirstToken(transformers.StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when the first token was there."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _prompt(chat: ChatEncoder, session: AgentSession) -> tuple[int, ...]:
    return chat.encode_chat([Message(role="user", content=session.turns[0])], session.tools)


def _cores() -> set[int]:
    return os.sched_getaffinity(0)

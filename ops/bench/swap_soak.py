"""Swaps under load: what 200 of them cost eight running sessions."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.protocol import EngineError
from redraft.engine.types import GREEDY, DrafterPointer, DrafterVersion, GenerationRequest, StopConditions
from redraft.ops.bench.report import progress

SESSIONS = 8
MAX_TOKENS = 64
SECONDS_BETWEEN = 0.5


class Load:
    """Sessions in closed loop on an engine's socket; answers are compared with what no drafter gave."""

    def __init__(self, engine: EmbeddedEngine, prompts: Sequence[tuple[int, ...]]) -> None:
        self._engine = engine
        self._prompts = prompts
        self._expected: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._numbers = itertools.count()
        self.answers = self.failed = self.violations = 0
        self.gaps: list[float] = []

    async def learn(self) -> None:
        """Have every prompt answered without a drafter."""
        for prompt in self._prompts:
            self._expected[prompt] = await self._answer(prompt, speculation=False)
        self.gaps.clear()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep ``SESSIONS`` answers running until ``stop``; each then ends."""
        turns = itertools.cycle(self._prompts)

        async def session(turns: Iterator[tuple[int, ...]]) -> None:
            while not stop.is_set():
                prompt = next(turns)
                try:
                    tokens = await self._answer(prompt, speculation=True)
                except EngineError:
                    self.failed += 1
                else:
                    self.answers += 1
                    self.violations += tokens != self._expected[prompt]

        await asyncio.gather(*(session(turns) for _ in range(SESSIONS)))

    async def _answer(self, prompt: tuple[int, ...], *, speculation: bool) -> tuple[int, ...]:
        request = GenerationRequest(
            request_id=f"soak-{next(self._numbers)}",
            prompt_ids=prompt,
            stopping=StopConditions(max_tokens=MAX_TOKENS),
            sampling=GREEDY,
            speculation=speculation,
        )
        tokens: list[int] = []
        last: float | None = None
        async for commit in self._engine.generate(request):
            now = time.perf_counter()
            if last is not None:
                self.gaps.append(now - last)
            last = now
            tokens += commit.token_ids
        return tuple(tokens)


async def soak(
    engine: EmbeddedEngine,
    pid: int,
    prompts: Sequence[tuple[int, ...]],
    drafters: Sequence[tuple[DrafterVersion, Path]],
    pointer: DrafterPointer,
    swaps: int,
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Metrics and a row: failures, violations, growth of the engine's memory, and gaps between commits in steps.

    Both runs have the same load; in the second, every `SECONDS_BETWEEN` the other of ``drafters`` is loaded and made to
    serve. A gap's excess is over the run without swaps, in units of its median gap. Memory rises and falls with how
    much of each version's draft K/V has been written; its growth is that of the peak from the first half of the swaps
    to the second.
    """
    load = Load(engine, prompts)
    await load.learn()
    seconds = swaps * SECONDS_BETWEEN
    progress(f"{SESSIONS} sessions without swaps")
    await _timed(load, asyncio.sleep(seconds))
    still, load.gaps = load.gaps, []
    resident: list[int] = []

    async def swap() -> None:
        nonlocal pointer
        for number in range(swaps):
            version, folder = drafters[number % len(drafters)]
            await engine.load_drafter(version, folder)
            pointer = DrafterPointer(
                target=pointer.target, serving=version, previous=pointer.serving, token=pointer.token + 1
            )
            await engine.activate(pointer)
            await asyncio.sleep(SECONDS_BETWEEN)
            resident.append(_resident(pid))

    progress(f"{swaps} swaps under {SESSIONS} sessions")
    await _timed(load, swap())
    step = median(still)
    memory = [size / 2**20 for size in resident]
    added = {f"swap_added_gap_p{p}_steps": (_cut(load.gaps, p) - _cut(still, p)) / step for p in (50, 99)}
    metrics: dict[str, float | None] = {
        "swap_failed_requests": load.failed,
        "swap_lossless_violations": load.violations,
        "swap_rss_growth_mib": max(memory[swaps // 2 :]) - max(memory[: swaps // 2]),
        **added,
    }
    row = {
        "part": "swaps",
        "swaps": swaps,
        "answers": load.answers,
        "gap_ms": {p: round(_cut(still, p) * 1e3, 1) for p in (50, 99)},
        "rss_mib": [round(size) for size in memory[:: max(1, swaps // 20)]],
        "gap_ms_swapping": {p: round(_cut(load.gaps, p) * 1e3, 1) for p in (50, 99)},
    }
    return metrics, row


async def _timed(load: Load, meanwhile: Any) -> None:
    """Run the load for as long as ``meanwhile`` takes."""
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(stop))
    try:
        await meanwhile
    finally:
        stop.set()
        await running


def _cut(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _resident(pid: int) -> int:
    """Bytes of a process in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no resident memory; it ended")

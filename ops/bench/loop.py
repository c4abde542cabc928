"""`redraft bench loop`: what the loop wins back after a drift, what it costs while it does, and what it refuses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.checkpoints import resolve
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.types import GREEDY, AcceptLength, DrafterVersion, GenerationRequest, StopConditions
from redraft.feedback.contexts import TurnContext
from redraft.ops.bench.loop_offline import BLOCK_LENGTH, Offline, digest, key, load
from redraft.ops.bench.loop_poison import offer_all
from redraft.ops.bench.report import envelope, progress
from redraft.ops.bench.swap_soak import soak
from redraft.ops.demo import finale
from redraft.ops.demo.deployment import Deployed, deployed
from redraft.ops.demo.scenario import MAX_TOKENS, before, evaluation
from redraft.ops.demo.story import FAST, FULL, Phase, PhaseName, Plan, Story
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.provenance import present_commit
from redraft.retrain.replay import AcceptCounts, replay

DRAWS = 10_000
JUDGED = 50
AGENTS = 4
LOAD = 0.5
METHOD = (
    "A deployment of its own serves four BFCL assistants over HTTP; then prompt, names, result format and step order "
    f"are rewritten (ops/demo/scenario.py). {AGENTS} agents send sessions turn by turn, with exponential think times "
    "that make 50 % of the requests a second that the engine answers without speculation when saturated. Drift starts "
    "a training run beside serving. Recovery is replayed over the answers to sessions of test families, which nothing "
    "was trained, chosen or gated on: the share of the offline drafter's gain in accept length that the loop's drafter "
    "reaches, at block length 7; the offline one learnt from all sessions after the rewrite "
    "(ops/bench/loop_offline.py). Anchor loss is the relative goodput lost on sessions of test families as they were "
    "before the rewrite; both drafters have one shape, and a step costs the same. Bounds are of a bootstrap over "
    "sessions. P95 TPOT while training is against the same load, traffic and drafter before. A lossless violation is "
    "an answer that differs from the one without a drafter."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One evaluation session's verify steps under each drafter; ``offline`` None where nothing was committed for it."""

    old: AcceptLength
    new: AcceptLength
    offline: AcceptLength | None


def run(*, quick: bool = False) -> dict[str, Any]:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    commit = present_commit()
    plan = FAST if quick else replace(FULL, judged=JUDGED)
    metrics: dict[str, float | None] = {}
    table: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="redraft-") as folder:
        async with deployed(Path(folder), plan.settings, plan.recipe) as served:
            rate, seconds = await _capacity(served, 12 if quick else 40)
            think = max(0.0, AGENTS / (LOAD * rate) - seconds)
            metrics["nospec_requests_per_s"] = rate
            plan = replace(plan, agents=AGENTS, agents_training=AGENTS, think=think, think_training=think)
            story = Story(served, plan, progress, _ticked, _step)
            try:
                await story.play()
                if story.run is not None and story.run.outcome == "promoted":
                    await story.serve("anchors", evaluation(), plan.judged, until=lambda: False)
                await _report(story, plan, Path(folder), metrics, table, quick)
            finally:
                await story.close()
    return envelope("loop", METHOD, commit, metrics, table)


async def _report(
    story: Story,
    plan: Plan,
    folder: Path,
    metrics: dict[str, float | None],
    table: list[dict[str, Any]],
    quick: bool,
) -> None:
    assert story.run is not None
    assert story.signal is not None
    training = next(phase for phase in story.phases if phase.name == "training")
    promoted = story.run.outcome == "promoted"
    metrics["promoted"] = float(promoted)
    metrics["minutes_signal_to_promoted"] = (training.ended - story.signal.time) / 60 if promoted else None
    metrics["p95_tpot_increase_while_training"] = _p95(story, "training") / _p95(story, "drift") - 1
    checked, violations = await finale.lossless(story, 10 if quick else 60, _step)
    metrics["failed_requests"] = sum(len(phase.failures) for phase in story.phases)
    metrics["lossless_violations"], metrics["lossless_checked"] = violations, checked
    table += [_phase(story, phase) for phase in story.phases]
    old, serving = finale.bundled_folder(story), story.serving()
    if not promoted or serving is None:
        return
    new = story.registry.path(serving)
    target = finale.frozen_target(story)
    engine = EmbeddedEngine(story.served.socket)
    try:
        table.append(_recovery(story, old, new, target, metrics))
        table.append(_anchors(story, old, new, target, metrics))
        table.append(await _swaps(story, engine, [(story.signal.drafter, old), (serving, new)], metrics, quick))
        progress(f"so far: {metrics}")
        refused = await offer_all(story, engine, old, new, target, folder / "poisoned", quick=quick)
        metrics["poisoned_refused_share"] = mean(each.outcome == "refused" for each in refused)
        table += [{"part": "poisoned", **to_builtins(each)} for each in refused]
    finally:
        await engine.close()


async def _swaps(
    story: Story,
    engine: EmbeddedEngine,
    drafters: Sequence[tuple[DrafterVersion, Path]],
    metrics: dict[str, float | None],
    quick: bool,
) -> dict[str, Any]:
    """Swaps under load, the last of which leaves serving what the pointer names."""
    pointer = story.pointers.load(story.target)
    state = story.served.deployment.read()
    process = state.services["engine"].process if state else None
    assert pointer is not None
    assert process is not None
    prompts = _prompts(ChatEncoder.from_folder(resolve(story.served.config.engine.model)), 8)
    found, row = await soak(engine, process.pid, prompts, drafters, pointer, 20 if quick else 200)
    metrics.update(found)
    return row


async def _capacity(served: Deployed, requests: int) -> tuple[float, float]:
    """Requests a second without speculation, with as many at once as run, and seconds of one alone."""
    engine = EmbeddedEngine(served.socket)
    encoder = ChatEncoder.from_folder(resolve(served.config.engine.model))
    prompts = iter(_prompts(encoder, requests + 4))
    numbers = iter(range(requests + 4))

    async def answer(prompt: tuple[int, ...]) -> None:
        request = GenerationRequest(
            request_id=f"capacity-{next(numbers)}",
            prompt_ids=prompt,
            stopping=StopConditions(max_tokens=MAX_TOKENS),
            sampling=GREEDY,
            speculation=False,
        )
        async for _ in engine.generate(request):
            pass

    async def session() -> None:
        for prompt in prompts:
            await answer(prompt)

    try:
        progress("capacity without speculation")
        started = time.perf_counter()
        for _ in range(4):
            await answer(next(prompts))
        alone = (time.perf_counter() - started) / 4
        started = time.perf_counter()
        await asyncio.gather(*(session() for _ in range(served.config.engine.max_running)))
        return requests / (time.perf_counter() - started), alone
    finally:
        await engine.close()


def _prompts(encoder: ChatEncoder, count: int) -> list[tuple[int, ...]]:
    """First turns before the rewrite; what is asked here is not recorded."""
    found = [encoder.encode_chat(session.messages[:1], session.tools) for session in before()]
    return [found[index % len(found)] for index in range(count)]


def _recovery(
    story: Story, old: Path, new: Path, target: FrozenTarget, metrics: dict[str, float | None]
) -> dict[str, Any]:
    """Over the answers to evaluation sessions after the rewrite."""
    answers = finale.answers_of(story, "recovered")
    accepted = _offline(answers, load())
    judged = [
        Judged(under_old.length, under_new.length, accepted.get(session))
        for session, (under_old, under_new) in _counts(answers, (old, new), target, "recovered").items()
    ]
    compared = [each for each in judged if each.offline is not None]
    for name, length in _sums(judged).items():
        metrics[f"tau_{name}"] = length.tau
    metrics["recovery_share"] = _share(compared) if compared else None
    metrics["recovery_share_lo95"] = float(np.quantile(recovery_shares(compared), 0.05)) if len(compared) > 1 else None
    sums = {name: [length.committed, length.verify_steps] for name, length in _sums(judged).items()}
    return {"part": "recovery", "sessions": len(judged), "with_offline": len(compared), **sums}


def recovery_shares(judged: Sequence[Judged]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bootstrap draws of the share, over sessions."""
    rng = random.Random(0)  # noqa: S311
    return np.array([_share(rng.choices(judged, k=len(judged))) for _ in range(DRAWS)])


def _share(judged: Sequence[Judged]) -> float:
    """(new - old) / (offline - old) of pooled accept lengths."""
    sums = _sums(judged)
    old, new, offline = (sums[name].tau or 0.0 for name in ("old", "new", "offline"))
    return (new - old) / (offline - old) if offline > old else float("nan")


def _sums(judged: Sequence[Judged]) -> dict[str, AcceptLength]:
    return {
        "old": sum((each.old for each in judged), AcceptLength()),
        "new": sum((each.new for each in judged), AcceptLength()),
        "offline": sum((each.offline for each in judged if each.offline), AcceptLength()),
    }


def _anchors(
    story: Story, old: Path, new: Path, target: FrozenTarget, metrics: dict[str, float | None]
) -> dict[str, Any]:
    """Goodput lost on what was asked before the rewrite; a step of either drafter, of one shape, costs the same."""
    counts = _counts(finale.answers_of(story, "anchors"), (old, new), target, "anchors").values()
    sums = np.array([[o.committed, o.verify_steps, n.committed, n.verify_steps] for o, n in counts], dtype=float)
    drawn = sums[np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))].sum(1)
    metrics["anchor_loss"] = float(_loss(sums.sum(0)))
    metrics["anchor_loss_hi95"] = float(np.quantile(_loss(drawn), 0.95))
    old_committed, old_steps, new_committed, new_steps = map(int, sums.sum(0))
    return {
        "part": "anchors",
        "sessions": len(sums),
        "old": [old_committed, old_steps],
        "new": [new_committed, new_steps],
    }


def _loss(sums: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """1 - new / old of accept lengths; sums [..., 4]: committed and verify steps of the old, and of the new."""
    losses: np.ndarray[Any, np.dtype[np.float64]] = 1 - (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])
    return losses


def _counts(
    answers: Mapping[str, Mapping[int, TurnContext]], folders: tuple[Path, Path], target: FrozenTarget, what: str
) -> dict[str, tuple[AcceptCounts, AcceptCounts]]:
    """Answers under both drafters, by session."""
    samples = finale.samples_of(answers)
    totals: list[dict[str, AcceptCounts]] = []
    for folder in folders:
        drafting = finale.drafting_of(folder, target)
        total: dict[str, AcceptCounts] = {}
        for number, each in enumerate(replay(samples, drafting, [BLOCK_LENGTH]), 1):
            counts, session = each.counts[BLOCK_LENGTH], each.sample.session
            total[session] = total[session] + counts if session in total else counts
            _step(number, len(samples), f"replaying {what}")
        totals.append(total)
    return {session: (totals[0][session], totals[1][session]) for session in totals[0]}


def _offline(answers: Mapping[str, Mapping[int, TurnContext]], offline: Offline | None) -> dict[str, AcceptLength]:
    """What the offline drafter accepted, of sessions whose every answer is the one it was measured on."""
    if offline is None:
        return {}
    found: dict[str, AcceptLength] = {}
    for session, turns in answers.items():
        accepted = [offline.answers.get(key(session, turn)) for turn in turns]
        said = [digest(context.token_ids[context.prompt_tokens :]) for context in turns.values()]
        lengths = [
            AcceptLength(each.committed, each.verify_steps)
            for each, its in zip(accepted, said, strict=True)
            if each is not None and each.digest == its
        ]
        if len(lengths) == len(turns):
            found[session] = sum(lengths, AcceptLength())
    return found


def _phase(story: Story, phase: Phase) -> dict[str, Any]:
    length, tpot = story.watch.length(phase.sessions), phase.tpot()
    return {
        "part": "phase",
        "phase": phase.name,
        "sessions": len(phase.sessions),
        "requests": len(phase.turns),
        "failed": len(phase.failures),
        "seconds": round(phase.ended - phase.started, 1),
        "committed": length.committed,
        "verify_steps": length.verify_steps,
        "tpot_p50_ms": round(tpot[0], 1) if tpot else None,
        "tpot_p95_ms": round(tpot[1], 1) if tpot else None,
    }


def _p95(story: Story, name: PhaseName) -> float:
    """Of TPOT, over every phase of that name."""
    turns = [turn for phase in story.phases if phase.name == name for turn in phase.turns]
    return quantiles([turn.tpot for turn in turns if turn.tpot is not None], n=20, method="inclusive")[18]


def _ticked(phase: str, done: int, wanted: int, tau: float | None) -> None:
    if done % 10 == 0:
        progress(f"{phase}: {done} of at most {wanted} sessions" + (f", tau {tau:.2f}" if tau else ""))


def _step(step: int, steps: int, text: str) -> None:
    if step == steps:
        progress(f"{text}: {steps}")

"""`redraft bench drafters`: how much each drafter gains on agent traffic that nothing was trained or tuned on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter
from typing import Any, Literal

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.checkpoints import DEFAULT_MODEL, resolve
from redraft.engine.config import EngineConfig
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.server import build_core
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import (
    GREEDY,
    AcceptLength,
    GenerationRequest,
    Principal,
    SamplingParams,
    StopConditions,
    VerifyStep,
    context_bucket,
    is_looping,
)
from redraft.ops.bench.report import envelope, progress, spread
from redraft.ops.errors import CliError
from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.prompts import Prompt, Prompts
from redraft.retrain.data.sources import SOURCES
from redraft.retrain.data.splits import Split, split_of
from redraft.retrain.provenance import present_commit

NONE = "none"
DRAFTERS = (NONE, "ngram", "dflash")
"""Always compared; ``dflash`` is the bundled one."""

BLOCK_SIZES = (4, 8, 16)
LOADS = (1, 8, 32)
RIVALS = ("eagle3", "mtp")
"""What DFlash is held against: the fastest on the calibrate split of those whose names begin so."""

SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, seed=1)
METHOD = (
    f"{DEFAULT_MODEL} in the embedded engine, bf16; on a CPU with every core. Prompts are turns of agent sessions from "
    "scenario families of the test split: nothing was trained, calibrated or chosen on them. Each drafter runs at the "
    "block size that was fastest on the calibrate split. Every group of sessions is answered by each drafter in turn, "
    "in an order that rotates; answers are greedy unless said otherwise. Time to first token at 1 session is of cold "
    "prompts; at more and sampled, each session finds its own prefix kept and no other's. tau is committed tokens over "
    "verify steps, pooled. A speed-up is the ratio of decode time (first to last token) for the same tokens, median "
    "over pairs. Looping answers (60 tokens or more, fewer than 60 % distinct 8-grams) are in rows of their own and "
    "in no headline. A lossless violation is an answer that differs from the one without drafter."
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one drafter did for one prompt; times in seconds from submission."""

    prompt: Prompt
    tokens: tuple[int, ...]
    steps: tuple[VerifyStep, ...]
    first_token: float
    last_token: float

    @property
    def looping(self) -> bool:
        return is_looping(self.tokens)

    @property
    def decode_seconds(self) -> float:
        return self.last_token - self.first_token

    @property
    def tpot(self) -> float:
        return self.decode_seconds / max(len(self.tokens) - 1, 1)


@dataclass(slots=True)
class Growing:
    tokens: list[int] = field(default_factory=list)
    steps: list[VerifyStep] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def run(*, quick: bool = False, drafters: Path | None = None) -> dict[str, Any]:
    """Compare the bundled drafters and the checkpoints in folders of ``drafters``, by their folders' names."""
    return compare("drafters", quick=quick, drafters=drafters, device="cpu")


def compare(name: str, *, quick: bool, drafters: Path | None, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """The benchmark ``name`` on a device."""
    commit = present_commit()
    encoder = ChatEncoder.from_folder(resolve(DEFAULT_MODEL))
    answer_tokens = 48 if quick else 128
    progress("reading the sources")
    sessions = {source: list(conversations()) for source, conversations in SOURCES.items()}
    calibrate = list(prompts(encoder, sessions, "calibrate", 1))
    tests = list(prompts(encoder, sessions, "test", 1 if quick else 3))
    named = {each: each for each in DRAFTERS} | _checkpoints(drafters)
    cores = {
        each: build_core(EngineConfig(drafter=drafter, device=device, max_running=max(LOADS)))[0]
        for each, drafter in named.items()
    }
    if cores["dflash"].drafter == cores["ngram"].drafter:
        raise CliError(f"no DFlash drafter is bundled for {DEFAULT_MODEL}; there is nothing to compare")
    metrics: dict[str, float | None] = {}
    table: list[dict[str, Any]] = []
    _choose_block_sizes(cores, calibrate, answer_tokens, metrics, table)
    for load in LOADS[:1] if quick else LOADS:
        answers = _compare(cores, tests, load, answer_tokens, GREEDY)
        _report(f"{load}", answers, metrics, table)
    if not quick:
        sampled = _compare(cores, tests, 1, answer_tokens, SAMPLED)
        _report("1_sampled", sampled, metrics, table)
    return envelope(name, METHOD, commit, metrics, table)


def _checkpoints(folder: Path | None) -> dict[str, str]:
    """Checkpoints in a folder, as ``engine.drafter`` takes them, by the names of their own folders."""
    if folder is None:
        return {}
    found = {file.parent.name: str(file.parent.resolve()) for file in sorted(folder.glob("*/config.json"))}
    if not found:
        raise CliError(f"{folder} has no folder with a drafter checkpoint in it")
    if taken := found.keys() & DRAFTERS:
        raise CliError(f"{folder}: {', '.join(sorted(taken))} is the name of one that is compared anyway; rename it")
    return found


def prompts(
    encoder: ChatEncoder, sessions: Mapping[Source, Sequence[Conversation]], split: Split, per_source: int
) -> Iterator[Prompt]:
    """Prompts of one split, spread evenly over each source's sessions and over the turns within them."""
    for source, conversations in sessions.items():
        chosen = [each for each in conversations if split_of(source, each.family) == split]
        for index, session in enumerate(spread(chosen, per_source)):
            if turns := list(Prompts(encoder, [session])):
                yield turns[index * len(turns) // per_source]


def answer_all(core: EngineCore, group: Sequence[Prompt], max_tokens: int, sampling: SamplingParams) -> list[Answer]:
    """Answer prompts at the same time, each for a tenant of its own, whose prefixes are only what it asked before."""
    growing = [Growing() for _ in group]
    started = perf_counter()
    for index, prompt in enumerate(group):
        core.submit(
            GenerationRequest(
                request_id=str(index),
                prompt_ids=prompt.ids,
                stopping=StopConditions(max_tokens=max_tokens),
                sampling=sampling,
                principal=Principal(prompt.id),
            )
        )
    while core.running or core.waiting:
        for commit in core.step():
            answer = growing[int(commit.request_id)]
            answer.tokens += commit.token_ids
            answer.times.append(perf_counter() - started)
            if commit.verify_step is not None:
                answer.steps.append(commit.verify_step)
    return [
        Answer(prompt, tuple(found.tokens), tuple(found.steps), found.times[0], found.times[-1])
        for prompt, found in zip(group, growing, strict=True)
    ]


def _compare(
    cores: dict[str, EngineCore], tests: Sequence[Prompt], load: int, max_tokens: int, sampling: SamplingParams
) -> dict[str, list[Answer]]:
    """Answers by drafter, prompt by prompt the same; groups of ``load`` sessions, drafters in rotating order."""
    answers: dict[str, list[Answer]] = {name: [] for name in cores}
    spread = sorted(tests, key=lambda prompt: prompt.id)
    groups = [spread[first : first + load] for first in range(0, len(spread), load)]
    for index, group in enumerate(groups):
        progress(f"{load} at once, {sampling.mode}: group {index + 1} of {len(groups)}")
        names = list(cores)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            answers[name] += answer_all(cores[name], group, max_tokens, sampling)
    return answers


def _choose_block_sizes(
    cores: dict[str, EngineCore],
    calibrate: Sequence[Prompt],
    max_tokens: int,
    metrics: dict[str, float | None],
    table: list[dict[str, Any]],
) -> None:
    """Leave every drafter at the block size with the fewest decode seconds a token on the calibrate split."""
    for name, core in cores.items():
        if name == NONE:
            answer_all(core, calibrate[:1], 8, GREEDY)
            continue
        tpot = {}
        for block_size in BLOCK_SIZES:
            progress(f"block size {block_size} for {name}")
            core.block_size, core.policy = block_size, FixedLength(block_size)
            answers = [
                answer
                for prompt in calibrate
                for answer in answer_all(core, [prompt], max_tokens, GREEDY)
                if not answer.looping
            ]
            tokens = sum(len(answer.tokens) - 1 for answer in answers)
            tpot[block_size] = sum(answer.decode_seconds for answer in answers) / tokens
            accept = _accept_length(answers)
            table.append(
                {
                    "part": "calibrate",
                    "drafter": name,
                    "block_size": block_size,
                    "tpot_ms": round(tpot[block_size] * 1e3, 2),
                    "draft_ms": _draft_ms(answers),
                    "committed": accept.committed,
                    "verify_steps": accept.verify_steps,
                }
            )
        best = min(tpot, key=lambda size: tpot[size])
        core.block_size, core.policy = best, FixedLength(best)
        metrics[f"block_size_{name}"], metrics[f"calibrate_tpot_ms_{name}"] = best, tpot[best] * 1e3


def _report(
    part: str, answers: dict[str, list[Answer]], metrics: dict[str, float | None], table: list[dict[str, Any]]
) -> None:
    plain = answers[NONE]
    metrics[f"looping_share_{part}"] = mean(answer.looping for answer in plain)
    for name, found in answers.items():
        table += _rows(part, name, found)
        if name == NONE:
            continue
        violations = sum(a.tokens != b.tokens for a, b in zip(found, plain, strict=True))
        metrics["lossless_violations"] = (metrics.get("lossless_violations") or 0) + violations
        pairs = [(a, b) for a, b in zip(found, plain, strict=True) if not b.looping and len(b.tokens) > 1]
        suffix = "" if part == "1" else f"_{part}"
        metrics[f"tau_{name}{suffix}"] = _accept_length(a for a, _ in pairs).tau
        metrics[f"speedup_{name}_{part}"] = median(b.tpot / a.tpot for a, b in pairs)
        metrics[f"speedup_{name}_{part}_pooled"] = sum(b.decode_seconds for _, b in pairs) / sum(
            a.decode_seconds for a, _ in pairs
        )
    if part == "1" and metrics["tau_dflash"] and metrics["tau_ngram"]:
        metrics["tau_dflash_over_ngram"] = metrics["tau_dflash"] / metrics["tau_ngram"]
    for kind in RIVALS:
        rivals = [name for name in answers if name.startswith(kind)]
        if part == "1" and rivals:
            rival = min(rivals, key=lambda name: metrics.get(f"calibrate_tpot_ms_{name}") or 0.0)
            ours, theirs = metrics["speedup_dflash_1_pooled"], metrics[f"speedup_{rival}_1_pooled"]
            assert ours and theirs
            metrics[f"dflash_vs_{kind}_best"] = ours / theirs


def _rows(part: str, name: str, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """One row over all non-looping answers, then by source, by context bucket, and the looping ones."""
    kept = [answer for answer in answers if not answer.looping]
    groups: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.looping:
            groups["looping", "all"].append(answer)
            continue
        groups["all", "all"].append(answer)
        groups["source", answer.prompt.source].append(answer)
        groups["context", str(context_bucket(len(answer.prompt.ids)))].append(answer)
    for (kind, value), group in sorted(groups.items()):
        yield {"part": f"load {part}", "drafter": name, "by": kind, "value": value, **_summary(group)}
    hazard = _hazard(kept)
    if hazard:
        yield {"part": f"load {part}", "drafter": name, "by": "position", "hazard": hazard}


def _summary(answers: Sequence[Answer]) -> dict[str, Any]:
    accept = _accept_length(answers)
    tpot = [answer.tpot * 1e3 for answer in answers if len(answer.tokens) > 1]
    cuts = quantiles(tpot, n=20, method="inclusive") if len(tpot) > 1 else tpot * 19
    return {
        "answers": len(answers),
        "committed": accept.committed,
        "verify_steps": accept.verify_steps,
        "tau": None if accept.tau is None else round(accept.tau, 3),
        "ttft_p50_ms": round(median(answer.first_token for answer in answers) * 1e3, 1),
        "tpot_mean_ms": round(mean(tpot), 2) if tpot else None,
        "tpot_p50_ms": round(median(tpot), 2) if tpot else None,
        "tpot_p95_ms": round(cuts[18], 2) if tpot else None,
        "draft_ms": _draft_ms(answers),
    }


def _draft_ms(answers: Sequence[Answer]) -> float | None:
    """Mean milliseconds of a verify step's drafts."""
    spent = [step.draft_ms for answer in answers for step in answer.steps]
    return round(mean(spent), 2) if spent else None


def _accept_length(answers: Iterable[Answer]) -> AcceptLength:
    total = AcceptLength()
    for answer in answers:
        for step in answer.steps:
            total = total.add_step(step)
    return total


def _hazard(answers: Sequence[Answer]) -> list[dict[str, int]]:
    """How often a position was verified with all before it accepted and no stop, and how often it was accepted then."""
    steps = [step for answer in answers for step in answer.steps]
    longest = max((step.block_length for step in steps), default=0)
    return [
        {
            "position": k,
            "reached": sum(step.block_length >= k <= len(step.committed) for step in steps),
            "accepted": sum(step.accepted >= k for step in steps),
        }
        for k in range(1, longest + 1)
    ]

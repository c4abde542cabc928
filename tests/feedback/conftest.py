"""Turns as a gateway hands them over, made by hand or by verifying drafts as the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.types import (
    GREEDY,
    DrafterVersion,
    GenerationRequest,
    StopConditions,
    VerifyStep,
)
from redraft.feedback.capture import Capture, Turn
from redraft.feedback.config import FeedbackConfig
from redraft.feedback.metrics import CaptureMetrics

DFLASH = DrafterVersion("dflash", "1")


def make_step(position: int, committed: Sequence[int], drafted: Sequence[int] = (), **changes: Any) -> VerifyStep:
    """A step in which the target committed these tokens; what was accepted follows from them."""
    accepted = 0
    while accepted < min(len(drafted), len(committed)) and drafted[accepted] == committed[accepted]:
        accepted += 1
    fields: dict[str, Any] = {
        "request_id": "r",
        "choice": 0,
        "position": position,
        "drafted": tuple(drafted),
        "draft_prob": (0.9,) * len(drafted),
        "match_length": None,
        "block_length": len(drafted),
        "accepted": accepted,
        "committed": tuple(committed),
        "explored": True,
        "batch_size": 1,
        "total_rows": len(drafted) + 1,
        "draft_ms": 1.0,
        "verify_ms": 10.0,
        "target_entropy": (0.1,) * len(committed),
        "drafter": DFLASH,
        "target": "target",
        "cached_tokens": 0,
    }
    return VerifyStep(**{**fields, **changes})


def make_turn(steps: Sequence[VerifyStep] = (), *, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> Turn:
    """A greedy answer: 9, sampled by prefill, then what the steps committed."""
    request = {
        "request_id": "r",
        "prompt_ids": tuple(prompt),
        "stopping": StopConditions(max_tokens=99),
        "sampling": GREEDY,
        "session_id": "session",
    }
    request |= {key: changes.pop(key) for key in list(changes) if key in GenerationRequest.__struct_fields__}
    fields: dict[str, Any] = {
        "request": GenerationRequest(**request),
        "choice": 0,
        "target": "target",
        "token_ids": (9, *(token for step in steps for token in step.committed)),
        "steps": tuple(steps),
        "finish_reason": "stop",
        "seed": 7,
        "time": 1000.0,
    }
    return Turn(**{**fields, **changes})


def verified(
    prompt: int, answer: Sequence[int], proposals: Callable[[int], Sequence[int]], length: int
) -> list[VerifyStep]:
    """The steps in which an engine commits ``answer`` behind a prompt; its last token ends it, as a stop does."""
    steps = []
    position, end = prompt, prompt + len(answer)
    while position < end - 1:
        drafted = tuple(proposals(position))
        right = 0
        rest = answer[position + 1 - prompt :]
        while right < min(length, len(drafted), len(rest)) and drafted[right] == rest[right]:
            right += 1
        committed = rest[: right + 1]
        block = min(length, len(drafted))
        steps.append(make_step(position, committed, drafted, block_length=block, accepted=right))
        position += len(committed)
    return steps


def make_capture(tool_calls: Sequence[tuple[int, int]] = (), **config: Any) -> Capture:
    settings = FeedbackConfig(**{"baseline_share": 0.0, "entropy_share": 1.0, "draft_prob_share": 1.0, **config})
    return Capture(settings, tokenizer="tokenizer", template="template", tool_calls=lambda tokens: tool_calls)


def value(metrics: CaptureMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"redraft_capture_{name}", labels) or 0.0


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody, not even root, can make: a file is in its parent's place."""
    path = tmp_path / "file"
    path.write_text("not a folder")
    yield path / "below"

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from redraft.engine.types import DrafterVersion, VerifyStep
from redraft.ops.bench.drafters import NONE, Answer, _report
from redraft.retrain.data.prompts import Prompt

pytestmark = pytest.mark.unit
LOOP = (1, 2, 3) * 40


def prompt(source: str = "plain", length: int = 100) -> Prompt:
    return Prompt(id="p", source=source, family="f", split="test", session="s", turn=1, ids=(0,) * length)  # type: ignore[arg-type]


def step(accepted: int, block_length: int = 3) -> VerifyStep:
    return VerifyStep(
        request_id="r",
        choice=0,
        position=9,
        drafted=(0,) * block_length,
        draft_prob=None,
        match_length=None,
        block_length=block_length,
        accepted=accepted,
        committed=(0,) * (accepted + 1),
        explored=False,
        batch_size=1,
        total_rows=1,
        draft_ms=1.0,
        verify_ms=2.0,
        target_entropy=None,
        drafter=DrafterVersion("dflash", "x"),
        target="t",
        cached_tokens=0,
    )


def answer(tokens: tuple[int, ...], accepted: tuple[int, ...] = (), seconds: float = 1.0, **where: Any) -> Answer:
    return Answer(prompt(**where), tokens, tuple(map(step, accepted)), 0.5, 0.5 + seconds)


def report(**answers: list[Answer]) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    metrics: dict[str, float | None] = {}
    table: list[dict[str, Any]] = []
    _report("1", answers, metrics, table)
    return metrics, table


def test_tau_is_pooled_over_answers_that_do_not_loop() -> None:
    short, long = tuple(range(5)), tuple(range(40))
    metrics, table = report(
        none=[answer(short), answer(long), answer(LOOP)],
        ngram=[answer(short, (0,)), answer(long, (0, 0)), answer(LOOP, (3, 3))],
        dflash=[answer(short, (3,)), answer(long, (1, 0)), answer(LOOP, (3, 3))],
    )
    assert metrics["tau_dflash"] == 7 / 3
    assert metrics["tau_ngram"] == 1
    assert metrics["tau_dflash_over_ngram"] == 7 / 3
    assert metrics["looping_share_1"] == 1 / 3
    (looping,) = [row for row in table if row["drafter"] == "dflash" and row.get("by") == "looping"]
    assert (looping["committed"], looping["verify_steps"]) == (8, 2)


def test_a_hazard_counts_only_steps_that_reached_the_position() -> None:
    tokens = tuple(range(9))
    _, table = report(none=[answer(tokens)], ngram=[answer(tokens, (0,))], dflash=[answer(tokens, (0, 1, 3, 2))])
    (row,) = [row for row in table if row["drafter"] == "dflash" and row["by"] == "position"]
    assert [(each["reached"], each["accepted"]) for each in row["hazard"]] == [(4, 3), (3, 2), (2, 1)]


def test_what_lies_past_a_stop_was_not_reached() -> None:
    stopped = msgspec.structs.replace(step(1), committed=(0,))
    found = [Answer(prompt(), (1, 2), (step(1), stopped), 0.5, 1.5)]
    _, table = report(none=found, ngram=found, dflash=found)
    row = next(row for row in table if row["drafter"] == "dflash" and row["by"] == "position")
    assert [(each["reached"], each["accepted"]) for each in row["hazard"]] == [(2, 2), (1, 0), (0, 0)]


def test_a_speed_up_compares_decode_time_and_a_changed_answer_is_a_violation() -> None:
    tokens = tuple(range(11))
    metrics, _ = report(
        none=[answer(tokens, seconds=2.0), answer(tokens, seconds=2.0)],
        ngram=[answer(tokens, (0,), seconds=4.0), answer(tokens[:-1], (0,), seconds=1.8)],
        dflash=[answer(tokens, (0,), seconds=1.0), answer(tokens, (0,), seconds=1.0)],
    )
    assert metrics["speedup_dflash_1"] == 2.0
    assert metrics["lossless_violations"] == 1


def test_answers_are_reported_by_source_and_by_context() -> None:
    tokens = tuple(range(9))
    found = [answer(tokens, (1,), source="code", length=400), answer(tokens, (2,), source="math", length=900)]
    _, table = report(none=found, ngram=found, dflash=found)
    rows = {(row["by"], row["value"]): row for row in table if row["drafter"] == "dflash" and "value" in row}
    assert rows["source", "code"]["committed"] == rows["context", "512"]["committed"] == 2
    assert rows["source", "math"]["committed"] == rows["context", "1024"]["committed"] == 3
    assert NONE not in {row["value"] for row in rows.values()}

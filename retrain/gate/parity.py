"""Whether the engine itself does with the candidate what the replay says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import GREEDY, Commit, GenerationRequest, LosslessMode, Principal, StopConditions
from redraft.retrain.gate.measure import Answer

SLACK = 2
"""Verify steps that engine and replay may always differ by: a near-tie each in a short answer."""


class Parity(Struct, frozen=True, kw_only=True):
    """Answers given again by the engine, plainly and with the candidate.

    ``reproduced`` came out as recorded both times, and only these are compared with the replay's verify steps.
    ``violations`` came out otherwise with the candidate than without, which in ``invariant`` mode no drafter may cause;
    in ``tolerant`` mode near-ties may, so that none are counted.
    """

    answers: int
    reproduced: int
    violations: int
    committed: int
    engine_steps: int
    replay_steps: int
    tolerance: float

    @property
    def wrong(self) -> str | None:
        """What is wrong, in words."""
        if self.violations:
            return f"{self.violations} of {self.answers} answers change when the engine drafts with the candidate"
        if abs(self.engine_steps - self.replay_steps) > max(SLACK, self.tolerance * self.replay_steps):
            return (
                f"the engine took {self.engine_steps} verify steps for what the replay says takes {self.replay_steps} "
                f"({self.committed} tokens), more than {self.tolerance:.0%} apart"
            )
        return None


def check_parity(
    core: EngineCore, lossless: LosslessMode, answers: Iterable[Answer], block_length: int, tolerance: float
) -> Parity:
    """Have an idle engine that serves the candidate answer again, at a fixed block length, with cold prompts."""
    core.block_size, core.policy = block_length + 1, FixedLength(block_length + 1)
    total = reproduced = violations = committed = engine_steps = replay_steps = 0
    for answer in answers:
        ((start, end),) = answer.sample.spans
        prompt, recorded = answer.sample.token_ids[:start], answer.sample.token_ids[start:end]
        plain, _ = _answer(core, f"plain-{total}", prompt, len(recorded), speculation=False)
        drafted, verify_steps = _answer(core, f"drafted-{total}", prompt, len(recorded), speculation=True)
        total += 1
        violations += lossless == "invariant" and drafted != plain
        if plain == drafted == recorded:
            reproduced += 1
            committed += len(recorded) - 1
            engine_steps += verify_steps
            replay_steps += answer.new.verify_steps
    return Parity(
        answers=total,
        reproduced=reproduced,
        violations=violations,
        committed=committed,
        engine_steps=engine_steps,
        replay_steps=replay_steps,
        tolerance=tolerance,
    )


def _answer(
    core: EngineCore, name: str, prompt: Sequence[int], tokens: int, *, speculation: bool
) -> tuple[tuple[int, ...], int]:
    """Tokens and verify steps of one greedy answer, for a tenant of its own, who finds no prefix kept."""
    core.submit(
        GenerationRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            stopping=StopConditions(max_tokens=tokens),
            sampling=GREEDY,
            speculation=speculation,
            principal=Principal(f"gate-{name}"),
        )
    )
    commits: list[Commit] = []
    while core.running or core.waiting:
        commits += core.step()
    tokens_out = tuple(token for commit in commits for token in commit.token_ids)
    return tokens_out, sum(commit.verify_step is not None for commit in commits)

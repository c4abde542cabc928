"""The story in plain language."""

from __future__ import annotations

from collections.abc import Iterator

from redraft.engine.types import AcceptLength
from redraft.ops.demo.results import PhaseRow, Result


def sentences(result: Result) -> Iterator[str]:
    """What happened, a paragraph each, in the order it happened."""
    old, new = (next(row for row in result.phases if row.name == name) for name in ("before", "drift"))
    if old.tau and new.tau:
        yield (
            "An agent's requests were served with the bundled drafter. Accept length, the tokens that a verify step of "
            f"the model commits, was {_of(old)}; a token took {_ms(old)}. Then the agent was rewritten: new prompt, "
            "new tool names, new form of tool results, several calls a step. The same drafter guessed worse: until "
            f"training began, accept length was {_of(new)}; a token took {_ms(new)}."
        )
    drift = result.drift
    yield (
        f"Redraft noticed after {drift['sessions']} sessions, {_minutes(result.detected_at - result.rewritten_at)} "
        f"after the rewrite: accept length {drift['effect']:+.0%} against what it had learnt to expect "
        f"({drift['low']:+.0%} to {drift['high']:+.0%}, the stretch that set off the alarm)."
    )
    yield (
        f"It trained a candidate on the traffic it had kept and judged it, in {_minutes(result.run.seconds)}, while "
        f"serving went on. The gate's verdict: {result.run.outcome}."
    )
    if result.judged is not None and result.judged.new.verify_steps:
        before, after = result.judged.old, result.judged.new
        gain = before.verify_steps / after.verify_steps - 1
        yield (
            f"On {result.judged.sessions} sessions that nothing was trained on, the old drafter's accept length would "
            f"have been {_length(before)} and the new one's {_length(after)}, {gain:+.0%}, for the very same answers. "
            "These requests are of other scenarios: the two compare with each other alone."
        )
    poisoned = result.poisoned
    if poisoned is not None:
        rule = f" ({poisoned.rule})" if poisoned.rule else ""
        yield (
            f"Then the gate was offered a poisoned candidate: {poisoned.poison}. It was {poisoned.outcome}{rule}: "
            f"{poisoned.reason}."
        )
    yield (
        f"{sum(row.requests for row in result.phases)} requests, {result.failed_requests} failed; "
        f"{result.lossless_checked} answers were given again without any drafter, and {result.lossless_violations} "
        f"differed. It all took {_minutes(result.seconds)}."
    )


def _of(row: PhaseRow) -> str:
    return _length(AcceptLength(row.committed, row.verify_steps))


def _length(length: AcceptLength) -> str:
    return f"{length.tau or 0:.2f} ({length.committed}/{length.verify_steps})"


def _ms(row: PhaseRow) -> str:
    return f"{row.tpot_p50_ms:.0f} ms (median request)" if row.tpot_p50_ms is not None else "too little to time"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"

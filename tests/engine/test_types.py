from __future__ import annotations

import pytest

from redraft.engine.types import AcceptLength, DrafterVersion, SamplingParams, VerifyStep, context_bucket

pytestmark = pytest.mark.unit


def verify_step(committed: tuple[int, ...], block_length: int, accepted: int) -> VerifyStep:
    return VerifyStep(
        request_id="r",
        choice=0,
        position=10,
        drafted=(1,) * block_length,
        draft_prob=None,
        match_length=3,
        block_length=block_length,
        accepted=accepted,
        committed=committed,
        explored=False,
        batch_size=1,
        total_rows=block_length + 1,
        draft_ms=0.0,
        verify_ms=1.0,
        target_entropy=None,
        drafter=DrafterVersion("ngram", "builtin"),
        target="t",
        cached_tokens=0,
    )


def test_accept_length_pools_instead_of_averaging_ratios() -> None:
    long = AcceptLength(committed=90, verify_steps=10)
    short = AcceptLength(committed=1, verify_steps=1)
    pooled = long + short
    assert pooled.tau == 91 / 11
    assert pooled.tau != pytest.approx((9.0 + 1.0) / 2)


def test_accept_length_counts_bonus_eos_and_steps_without_draft_but_no_token_past_a_stop() -> None:
    total = AcceptLength()
    total = total.add_step(verify_step((5, 6, 7), block_length=3, accepted=2))
    total = total.add_step(verify_step((5,), block_length=0, accepted=0))
    total = total.add_step(verify_step((5, 2), block_length=7, accepted=2))
    assert (total.committed, total.verify_steps) == (6, 3)


def test_accept_length_of_nothing_is_unknown() -> None:
    assert AcceptLength().tau is None


@pytest.mark.parametrize(("position", "bucket"), [(0, 512), (512, 512), (513, 1024), (4096, 4096), (4097, 8192)])
def test_context_buckets_end_at_powers_of_two_from_512(position: int, bucket: int) -> None:
    assert context_bucket(position) == bucket


def test_vanishing_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).mode == "greedy"
    assert SamplingParams(temperature=1e-9).mode == "greedy"
    assert SamplingParams(temperature=0.1).mode == "sampled"

"""The embedded engine on one GPU, in the tolerant mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.embedded.attention import Segment
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.model import Target
from redraft.engine.policy.fixed import FixedLength
from redraft.kernels.gumbel import gumbel, noise_key

from .conftest import answers, load_target, run
from .test_core import GREEDY, SAMPLINGS, ScriptedDrafter, mixed_requests

pytestmark = pytest.mark.gpu

EPSILON = 0.05
"""Log-probability that a bf16 row may lose against the same row of another batch."""


@pytest.fixture(scope="module")
def gpu_target(tiny_checkpoint: Path) -> Target:
    return Target(
        tiny_checkpoint,
        load_config(tiny_checkpoint),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        invariant=False,
    )


def log_p(target: Target, tokens: list[int]) -> Tensor:
    """Log-probabilities [tokens, vocab] of a whole sequence, read one token at a time, without any drafter."""
    kv = target.new_kv(1024)
    rows = []
    for position, token in enumerate(tokens):
        hidden, _ = target.forward(
            torch.tensor([token], device=target.device),
            torch.tensor([position], device=target.device),
            [Segment(0, 1, 0, position)],
            kv,
        )
        rows.append(target.logits(hidden).float().log_softmax(-1))
    return torch.cat(rows)


def test_logits_on_the_gpu_equal_those_of_the_cpu(gpu_target: Target, tiny_checkpoint: Path) -> None:
    tokens = list(range(0, 250, 3))
    exact = log_p(load_target(tiny_checkpoint, dtype=torch.float32), tokens)
    found = log_p(gpu_target, tokens).cpu()
    on_cpu = log_p(load_target(tiny_checkpoint), tokens)
    assert float((found - exact).abs().mean()) < 1.5 * float((on_cpu - exact).abs().mean())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_every_emitted_token_is_within_epsilon_of_the_best_without_drafter(
    make_core: Callable[..., EngineCore], gpu_target: Target, sampling: object
) -> None:
    assert isinstance(sampling, type(GREEDY))
    requests = mixed_requests(sampling)
    plain = answers(
        run(make_core(target=gpu_target), [msgspec.structs.replace(r, speculation=False) for r in requests])
    )
    prompts = {r.request_id: list(r.prompt_ids) for r in requests}
    truth = [prompts[request_id] + ids for (request_id, _), ids in plain.items()]
    core = make_core(ScriptedDrafter(truth, 0.3), policy=FixedLength(16), block_size=16, target=gpu_target)
    drafted = answers(run(core, requests))
    assert drafted.keys() == plain.keys()
    if sampling.top_p < 1:
        return  # filters cut where two passes may round to either side; the sampled case covers the noise
    for (request_id, choice), ids in drafted.items():
        prompt = prompts[request_id]
        scores = log_p(gpu_target, prompt + ids)[len(prompt) - 1 : -1]
        for index, token in enumerate(ids):
            row = scores[index]
            if sampling.mode == "sampled":
                assert sampling.seed is not None
                row = row + gumbel(noise_key(sampling.seed, choice, len(prompt) + index), len(row), row.device)
            assert float(row.max() - row[token]) <= EPSILON


def test_noise_is_the_same_on_both_devices() -> None:
    key = noise_key(5, 1, 77)
    torch.testing.assert_close(gumbel(key, 50_000, torch.device("cuda")).cpu(), gumbel(key, 50_000))

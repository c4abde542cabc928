from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redraft.engine.embedded import linear as linear_module
from redraft.engine.embedded.attention import Segment, attend, plan_attention
from redraft.engine.embedded.linear import PackedLinear, PlainLinear, WideLinear, make_linear
from redraft.engine.embedded.model import Target
from redraft.engine.embedded.selftest import rows_are_invariant

from .conftest import load_target

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "num_key_value_heads": 3,
}
LLAMA3_ROPE = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}


def forward(target: Target, tokens: Tensor, chunk: int) -> Tensor:
    """Logits of all tokens, read ``chunk`` at a time."""
    kv = target.new_kv(512)
    logits = []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        positions = torch.arange(first, first + len(part))
        hidden, _ = target.forward(part, positions, [Segment(0, len(part), 0, first)], kv)
        logits.append(target.logits(hidden))
    return torch.cat(logits)


@pytest.mark.unit
@pytest.mark.parametrize("overrides", [{}, QWEN3, LLAMA3_ROPE], ids=["llama", "qwen3", "llama3-rope"])
@pytest.mark.parametrize("invariant", [True, False])
def test_logits_equal_transformers(make_checkpoint: Callable[..., Path], overrides: dict, invariant: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(scale=0.1, **overrides)
    tokens = torch.randint(320, (100,), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    found = forward(load_target(folder, dtype=torch.float32, invariant=invariant), tokens, chunk=33)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.unit
@pytest.mark.parametrize("overrides", [{}, QWEN3], ids=["llama", "qwen3"])
def test_rows_have_equal_bits_however_many_share_a_pass(
    make_checkpoint: Callable[..., Path], overrides: dict[str, Any]
) -> None:
    target = load_target(make_checkpoint(intermediate_size=1600, **overrides))
    tokens = torch.randint(320, (200,), generator=torch.Generator().manual_seed(2))
    expected = forward(target, tokens, chunk=1)
    for chunk in (2, 3, 8, 13, 64, 200):
        assert torch.equal(forward(target, tokens, chunk), expected), f"passes of {chunk} rows differ"


@pytest.mark.unit
def test_the_self_test_passes_invariant_rows_and_fails_a_target_whose_rows_depend_on_the_batch(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(make_checkpoint(max_position_embeddings=1024))
    assert rows_are_invariant(target)
    assert rows_are_invariant(load_target(make_checkpoint(max_position_embeddings=160)))
    assert not rows_are_invariant(load_target(make_checkpoint(max_position_embeddings=40)))
    original = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, hidden: original(self, hidden) * (1 + hidden.shape[0] / 256))
    assert not rows_are_invariant(target)


@pytest.mark.unit
@pytest.mark.parametrize("invariant", [True, False])
def test_attention_equals_a_plain_reference_over_a_ragged_batch(invariant: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    kv_heads, group, head_dim = 2, 3, 16
    kv = torch.randn(512, 2 * kv_heads, head_dim, generator=generator)
    segments = [Segment(0, 1, 0, 5), Segment(1, 7, 128, 60), Segment(8, 90, 256, 30)]
    rows = sum(segment.rows for segment in segments)
    q = torch.randn(rows, kv_heads * group, head_dim, generator=generator)
    tiles = plan_attention(segments, group, invariant=invariant, dtype=q.dtype, device=q.device)
    found = attend(q, kv, tiles).view(rows, kv_heads * group, head_dim)
    for segment in segments:
        for offset in range(segment.rows):
            keys = kv[segment.slot : segment.slot + segment.position + offset + 1]
            for head in range(kv_heads * group):
                k, v = keys[:, head // group], keys[:, kv_heads + head // group]
                weights = torch.softmax(k @ q[segment.row + offset, head] * head_dim**-0.5, 0)
                torch.testing.assert_close(found[segment.row + offset, head], weights @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.unit
@pytest.mark.parametrize("wide", [False, True], ids=["as this processor does", "without bf16 instructions"])
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("reduction", [64, 1536, 1600])
def test_linear_and_its_epilogues_equal_a_double_precision_product(
    reduction: int, invariant: bool, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(linear_module, "product_dtype", lambda _: torch.float32)
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(96, reduction, generator=generator).to(torch.bfloat16)
    x = torch.randn(9, reduction, generator=generator).to(torch.bfloat16)
    other = torch.randn(9, 96, generator=generator).to(torch.bfloat16)
    exact = x.double() @ weight.double().T
    linear = make_linear(weight, invariant=invariant)
    wide = linear_module.product_dtype(weight) == torch.float32
    assert (invariant and reduction > 1000) or type(linear) is (WideLinear if wide else PackedLinear)
    close = {"rtol": 2e-2, "atol": 0.5}
    torch.testing.assert_close(linear(x).double(), exact, **close)
    torch.testing.assert_close(linear.add(x, other).double(), exact + other.double(), **close)
    torch.testing.assert_close(linear.mul(x, other).double(), exact * other.double(), **close)
    torch.testing.assert_close(linear.silu(x).double(), torch.nn.functional.silu(exact), **close)


@pytest.mark.unit
def test_plain_products_serve_where_packed_ones_cannot() -> None:
    assert isinstance(make_linear(torch.zeros(4, 4), invariant=False), PlainLinear)


@pytest.mark.integration
def test_the_default_target_is_as_close_to_full_precision_as_transformers_in_bf16(default_target: Path) -> None:
    from transformers import AutoModelForCausalLM

    from redraft.engine.chat.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(default_target)
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    passages = [torch.tensor(tokenizer.encode(text[start : start + 700])) for start in range(0, 5600, 700)]

    def reference(dtype: torch.dtype) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(default_target, dtype=dtype)
        with torch.no_grad():
            return torch.cat([model(tokens[None]).logits[0].float() for tokens in passages])

    exact, theirs = reference(torch.float32), reference(torch.bfloat16)
    target = load_target(default_target)
    ours = torch.cat([forward(target, tokens, chunk=64).float() for tokens in passages])

    def typical_error(logits: Tensor) -> float:
        """The median over positions: a few unstable ones make a mean a matter of luck."""
        return (logits - exact).square().mean(-1).sqrt().median().item()

    def agreement(logits: Tensor) -> float:
        return (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()

    assert typical_error(ours) <= 1.1 * typical_error(theirs)
    assert agreement(ours) >= agreement(theirs) - 0.01
    assert isinstance(target.head, PackedLinear)

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.retrain import losses
from redraft.retrain.losses import Weigh, block_loss, dpace, prefix_decay

pytestmark = pytest.mark.unit

BLOCKS, SLOTS, HIDDEN, VOCAB = 11, 3, 16, 50


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden, head, labels, valid and teacher; labels count up to some slot of each block."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator).to(dtype)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (BLOCKS, SLOTS), generator=generator)
    valid = torch.arange(SLOTS) < torch.randint(SLOTS + 1, (BLOCKS, 1), generator=generator)
    teacher = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator).to(dtype)
    return hidden, head, labels, valid, teacher


def dense_weights(kind: str, hidden: Tensor, head: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """In plain loops, double precision."""
    weights = torch.zeros(labels.shape, dtype=torch.float64)
    probability = (hidden.double() @ head.double().T).softmax(-1).gather(2, labels[..., None])[..., 0]
    for block in range(BLOCKS):
        prefix = []
        for slot in range(SLOTS):
            smoothed = 0.5 * float(probability[block, slot]) + 0.5
            prefix.append((prefix[-1] if prefix else 1.0) * smoothed * bool(valid[block, slot]))
        for slot in range(SLOTS):
            if valid[block, slot]:
                decay = 2.718281828459045 ** (-slot / 4.0)
                weights[block, slot] = decay if kind == "prefix_decay" else sum(prefix[slot:])
    return weights


@pytest.mark.parametrize("distribution", [False, True])
@pytest.mark.parametrize("kind", ["prefix_decay", "dpace"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_loss_and_gradient_equal_a_dense_double_precision_reference(
    monkeypatch: pytest.MonkeyPatch, distribution: bool, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * VOCAB * SLOTS * 2)
    hidden, head, labels, valid, teacher = case(dtype)
    weigh: Weigh = prefix_decay(4.0) if kind == "prefix_decay" else dpace
    hidden.requires_grad_()
    terms = block_loss(hidden, head, labels, valid, weigh, teacher if distribution else None)
    (grad,) = torch.autograd.grad(terms.loss, hidden)

    exact = hidden.detach().double().requires_grad_()
    weights = dense_weights(kind, hidden.detach(), head, labels, valid)
    logprob = (exact @ head.double().T).log_softmax(-1)
    if distribution:
        wanted = (teacher.double() @ head.double().T).log_softmax(-1)
        rows = (wanted.exp() * (wanted - logprob)).sum(-1)
    else:
        rows = -logprob.gather(2, labels[..., None])[..., 0]
    expected = (rows * weights).sum()
    (expected_grad,) = torch.autograd.grad(expected, exact)
    assert terms.loss.dtype == terms.weight.dtype == torch.float32
    torch.testing.assert_close(terms.loss.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(terms.weight.double(), weights.sum(), rtol=tolerance, atol=tolerance)
    assert float((grad.double() - expected_grad).norm() / expected_grad.norm()) < tolerance
    assert not grad[~valid.any(1)].any()


def test_a_bf16_gradient_stays_right_where_the_draft_is_nearly_the_target() -> None:
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(512, 64, generator=generator).to(torch.bfloat16)
    teacher = torch.randn(40, 1, 64, generator=generator).to(torch.bfloat16)
    near = teacher + 0.02 * torch.randn(40, 1, 64, generator=generator).to(torch.bfloat16)
    hidden = near.detach().requires_grad_()
    labels, valid = torch.zeros(40, 1, dtype=torch.int64), torch.ones(40, 1, dtype=torch.bool)
    terms = block_loss(hidden, head.float(), labels, valid, prefix_decay(4.0), teacher.float())
    (grad,) = torch.autograd.grad(terms.loss, hidden)
    q = (near.double() @ head.double().T).softmax(-1)
    p = (teacher.double() @ head.double().T).softmax(-1)
    expected = (q - p) @ head.double()
    assert float((grad.double() - expected).norm() / expected.norm()) < 0.01


def test_no_more_logits_exist_at_once_than_a_chunk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, labels, valid, teacher = case()
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * VOCAB * SLOTS * 2)
    rows: list[int] = []
    original = losses.logits

    def counting(hidden: Tensor, head: Tensor) -> Tensor:
        rows.append(len(hidden))
        return original(hidden, head)

    monkeypatch.setattr(losses, "logits", counting)
    block_loss(hidden.requires_grad_(), head, labels, valid, dpace, teacher)
    assert max(rows) == 2 * SLOTS
    assert sum(rows) == 2 * BLOCKS * SLOTS


def test_a_slot_is_right_only_after_all_before_it_and_counts_only_with_a_label() -> None:
    hidden, head, labels, valid, _ = case()
    guess = (hidden @ head.T).argmax(-1)
    labels = guess.clone()
    labels[0, 0] = (labels[0, 0] + 1) % VOCAB
    valid[0] = True
    terms = block_loss(hidden, head, labels, valid, dpace)
    assert terms.reached.tolist() == valid.sum(0).tolist()
    assert terms.correct.tolist() == (valid.sum(0) - 1).tolist()


def test_nothing_is_learnt_without_a_label() -> None:
    hidden, head, labels, valid, _ = case()
    hidden.requires_grad_()
    terms = block_loss(hidden, head, labels, torch.zeros_like(valid), dpace)
    (grad,) = torch.autograd.grad(terms.loss, hidden)
    assert terms.loss.item() == terms.weight.item() == 0
    assert not grad.any()


def test_weights_pass_no_gradient() -> None:
    hidden, head, labels, valid, _ = case()
    hidden.requires_grad_()
    (grad,) = torch.autograd.grad(block_loss(hidden, head, labels, valid, dpace).loss, hidden)
    weights = dense_weights("dpace", hidden.detach(), head, labels, valid).float()
    rows = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), reduction="none")
    (expected,) = torch.autograd.grad((rows * weights.flatten()).sum(), hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)

"""Training on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from redraft.engine.drafters.dflash_checkpoint import DFlashConfig
from redraft.engine.embedded.attention import Segment, attend, plan_attention
from redraft.retrain.config import TrainConfig
from redraft.retrain.features import FeatureCache, FeatureCapture
from redraft.retrain.features_store import LocalStore, MemoryStore
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.losses import block_loss, dpace
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.strategy import BlockStrategy
from redraft.retrain.trainer import Trainer

from .conftest import CPU, make_record, make_sample, random_tokens

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture
def synchronising_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_whole_prompts_and_later_rows_attend_as_a_masked_reference_does() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_heads, group, head_dim = 3, 3, 64
    kv = torch.randn(512, 2 * kv_heads, head_dim, generator=generator).to(torch.bfloat16)
    q = torch.randn(200, kv_heads * group, head_dim, generator=generator).to(torch.bfloat16)
    segments = [Segment(0, 120, 0, 0), Segment(120, 1, 128, 0), Segment(121, 50, 192, 30), Segment(171, 29, 320, 0)]
    outputs = []
    for device in (CPU, CUDA):
        tiles = plan_attention(segments, group, invariant=False, dtype=q.dtype, device=device)
        outputs.append(attend(q.to(device), kv.to(device), tiles).cpu().float())
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_the_cpu_s(checkpoint: Path, target: FrozenTarget, dtype: torch.dtype) -> None:
    sequences = [random_tokens(length, length) for length in (100, 7, 64)]
    on_gpu = FeatureCapture(FrozenTarget.load(checkpoint, CUDA, dtype).target, (1, 3))(sequences)
    for one, other in zip(on_gpu, FeatureCapture(target.target, (1, 3))(sequences), strict=True):
        assert float(F.cosine_similarity(one.features.cpu().float(), other.features, dim=-1).mean()) >= 0.999


@pytest.mark.parametrize("distribution", [False, True])
def test_the_loss_is_the_cpu_s(distribution: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = torch.randn(2, 40, 7, 64, generator=generator).to(torch.bfloat16)
    head = torch.randn(500, 64, generator=generator).to(torch.bfloat16) / 8
    labels = torch.randint(500, (40, 7), generator=generator)
    valid = torch.arange(7) < torch.randint(8, (40, 1), generator=generator)
    results = []
    for device, dtype in ((CPU, torch.float32), (CUDA, torch.bfloat16)):
        x = hidden.to(device, dtype).requires_grad_()
        wanted = teacher.to(device, dtype) if distribution else None
        terms = block_loss(x, head.to(device, dtype), labels.to(device), valid.to(device), dpace, wanted)
        (grad,) = torch.autograd.grad(terms.loss, x)
        results.append((terms.loss.detach().cpu(), terms.weight.cpu(), grad.cpu().float()))
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.01


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("synchronising_is_an_error")
@pytest.mark.parametrize("loss", ["tokens", "distribution"])
def test_a_step_learns_and_never_waits_for_the_gpu(
    checkpoint: Path, shape: DFlashConfig, tmp_path: Path, loss: str
) -> None:
    target = FrozenTarget.load(checkpoint, CUDA, torch.bfloat16)
    samples = [make_sample(random_tokens(60 + seed, seed), [(20, 60 + seed)], id=str(seed)) for seed in range(4)]
    config = TrainConfig(steps=60, sequences=4, warmup=5, log_every=20, learning_rate=3e-3, loss=loss)  # type: ignore[arg-type]
    record = make_record(config, target)
    strategy = BlockStrategy(DFlashModel(shape, CUDA, 0), target, config, record)
    cache = FeatureCache(
        FeatureCapture(target.target, shape.feature_layers),
        MemoryStore(1 << 24),
        target,
        layers=shape.feature_layers,
        hidden=loss == "distribution",
    )
    trainer = Trainer(strategy, samples, cache, config, tmp_path, record)
    first, _ = trainer._train_step()
    torch.cuda.set_sync_debug_mode("error")
    trainer._train_step()
    torch.cuda.set_sync_debug_mode("default")
    trainer.run()
    last, _ = trainer._train_step()
    assert float(last.loss / last.weight) < 0.5 * float(first.loss / first.weight)


@pytest.mark.parametrize("hidden", [True, False])
def test_features_kept_in_files_come_back_on_the_gpu(
    checkpoint: Path, shape: DFlashConfig, tmp_path: Path, hidden: bool
) -> None:
    """A deployment on a GPU keeps them as one on a CPU does."""
    target = FrozenTarget.load(checkpoint, CUDA, torch.bfloat16)
    sample = make_sample(random_tokens(150, 0), [(100, 150)])
    cache = FeatureCache(
        FeatureCapture(target.target, shape.feature_layers),
        LocalStore(tmp_path, 1 << 24),
        target,
        layers=shape.feature_layers,
        hidden=hidden,
    )
    for one, other in zip(cache([sample], [150])[0], cache([sample], [150])[0], strict=True):
        assert torch.equal(one, other)

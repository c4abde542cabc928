from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.engine.checkpoints import identity
from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.dflash.model import DFlashModel
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.provenance import Provenance

CPU = torch.device("cpu")
EOS = 257


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """A tiny target deep enough for a drafter of two layers."""
    torch.set_num_threads(1)
    return make_checkpoint(num_hidden_layers=6, scale=0.15)


@pytest.fixture(scope="session")
def target(checkpoint: Path) -> FrozenTarget:
    return FrozenTarget.load(checkpoint, CPU, torch.float32)


@pytest.fixture(scope="session")
def shape(checkpoint: Path) -> DFlashConfig:
    config = load_config(checkpoint)
    return DFlashConfig.for_target(config, identity(checkpoint), layers=2, block_size=4, mask_token_id=3)


@pytest.fixture
def drafter(shape: DFlashConfig) -> DFlashModel:
    """Random weights large enough for every part to matter."""
    model = DFlashModel(shape, CPU, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


def make_sample(tokens: Sequence[int], spans: Sequence[tuple[int, int]], **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "id": "sample",
        "source": "plain",
        "family": "family",
        "split": "train",
        "session": "session",
        "greedy": True,
        "looping": False,
    }
    return Sample(token_ids=tuple(tokens), spans=tuple(spans), **(fields | changes))


def make_record(config: TrainConfig, target: FrozenTarget) -> Provenance:
    return Provenance(
        command="test",
        commit=None,
        target=target.identity,
        data="data",
        samples=1,
        tokens=1,
        config=config.model_dump(),
    )


def random_tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(4, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens

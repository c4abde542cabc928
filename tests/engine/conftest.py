from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.checkpoints.identity import identity
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, expected_shapes, save


@pytest.fixture(scope="session")
def make_dflash(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a DFlash checkpoint of random weights for a target; keyword arguments override its configuration."""

    def make(target: Path, *, seed: int = 0, layers: int = 2, block_size: int = 8, **overrides: Any) -> Path:
        config = DFlashConfig.for_target(
            load_config(target), identity(target), layers=layers, block_size=block_size, mask_token_id=3
        )
        config = replace(config, **({"feature_layers": (0, 1)} | overrides))
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
            for name, shape in expected_shapes(config).items()
        }
        folder = tmp_path_factory.mktemp("dflash")
        save(folder, config, tensors, card="# A drafter of random weights\n")
        return folder

    return make

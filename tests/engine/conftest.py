from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.checkpoints.identity import identity
from redraft.engine.drafters import eagle3_checkpoint, mtp_checkpoint
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, expected_shapes, save
from redraft.engine.drafters.eagle3_checkpoint import Eagle3Config, vocabulary
from redraft.engine.drafters.mtp_checkpoint import MtpConfig


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


@pytest.fixture(scope="session")
def make_eagle3(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes an EAGLE-3 checkpoint of random weights for a target; it drafts every token but each third."""

    def make(target: Path, *, seed: int = 0, layers: int = 1, block_size: int = 8, **overrides: Any) -> Path:
        words = torch.tensor([token for token in range(load_config(target).vocab) if token % 3])
        config = Eagle3Config.for_target(
            load_config(target), identity(target), layers=layers, block_size=block_size, draft_vocab=len(words)
        )
        config = replace(config, **({"feature_layers": (0, 1)} | overrides))
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
            for name, shape in eagle3_checkpoint.expected_shapes(config).items()
        }
        folder = tmp_path_factory.mktemp("eagle3")
        card = "# A drafter of random weights\n"
        eagle3_checkpoint.save(folder, config, tensors | vocabulary(words, config.vocab), card)
        return folder

    return make


@pytest.fixture(scope="session")
def make_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a checkpoint of random parallel heads for a target."""

    def make(target: Path, *, seed: int = 0, block_size: int = 8) -> Path:
        config = MtpConfig.for_target(load_config(target), identity(target), block_size=block_size)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
            for name, shape in mtp_checkpoint.expected_shapes(config).items()
        }
        folder = tmp_path_factory.mktemp("mtp")
        mtp_checkpoint.save(folder, config, tensors, card="# Heads of random weights\n")
        return folder

    return make

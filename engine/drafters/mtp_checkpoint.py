"""Checkpoints of parallel heads on disk. No other engine loads them: they are here to be compared with.

Embedding and head are the target's, so they are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig
from redraft.engine.drafters.checkpoint import (
    BlockSize,
    ConfigFile,
    DrafterConfig,
    check_target,
    check_tensors,
    read_config,
    read_tensors,
    shape_like,
    shape_of,
    write_config,
    write_tensors,
)

ARCHITECTURE = "RedraftMtpDraftModel"


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """What decides the heads' arithmetic: one for each draft slot of ``block_size``, on the target's last layer."""

    @classmethod
    def for_target(cls, target: ModelConfig, identity: str, *, block_size: int) -> MtpConfig:
        """Heads of the target's own width."""
        last = (target.layers - 1,)
        return cls(**shape_like(target), layers=1, block_size=block_size, feature_layers=last, target=identity)


class _Redraft(Struct, frozen=True):
    block_size: BlockSize
    feature_layers: list[int]
    target: str = ""


class _File(ConfigFile, frozen=True, kw_only=True):
    redraft: _Redraft


def load_config(folder: Path) -> MtpConfig:
    """Read ``config.json``; raises `DrafterError` naming what is missing or not supported."""
    config = read_config(folder, ARCHITECTURE, _File)
    own = config.redraft
    layers = tuple(own.feature_layers)
    return MtpConfig(**shape_of(config), block_size=own.block_size, feature_layers=layers, target=own.target)


def expected_shapes(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a checkpoint."""
    hidden = config.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "embedding_norm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return shapes | {f"heads.{slot}.weight": (hidden, hidden) for slot in range(config.block_size - 1)}


def check_fits(
    config: MtpConfig, target: ModelConfig, identity: str, where: Path, context_length: int | None = None
) -> None:
    """Raises `DrafterError` naming the first thing in which heads and target do not belong together."""
    check_target(config, target, identity, where, context_length)


def check(folder: Path, target: ModelConfig, identity: str, context_length: int | None = None) -> None:
    """Raises `DrafterError` for what configuration and the headers of the weights tell without reading these."""
    config = load_config(folder)
    check_fits(config, target, identity, folder, context_length)
    check_tensors(folder, expected_shapes(config))


def load(folder: Path) -> tuple[MtpConfig, dict[str, Tensor]]:
    """Configuration and tensors, checked against each other; raises `DrafterError`."""
    config = load_config(folder)
    return config, read_tensors(folder, expected_shapes(config))


def save(folder: Path, config: MtpConfig, tensors: Mapping[str, Tensor], card: str) -> None:
    """Write a checkpoint with its model card; weights are rounded to bf16."""
    own = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "redraft": {
            "target": config.target,
            "block_size": config.block_size,
            "feature_layers": list(config.feature_layers),
        },
    }
    write_config(folder, config, card, own)
    shapes = expected_shapes(config)
    write_tensors(folder, {name: tensors[name].detach().to("cpu", torch.bfloat16) for name in shapes}, shapes)

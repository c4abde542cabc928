"""DFlash checkpoints on disk, in the format that SGLang loads as ``DFlashDraftModel``.

The backbone is Qwen3-shaped. Embedding and head are the target's, so they are not stored. ``target_layer_ids`` are
0-based: the features of layer i are what leaves it, which Hugging Face calls ``hidden_states[i + 1]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig
from redraft.engine.drafters.checkpoint import (
    BlockSize,
    ConfigFile,
    DrafterConfig,
    DrafterError,
    Positive,
    Token,
    check_given,
    check_same,
    check_supported,
    check_target,
    check_tensors,
    read_config,
    read_tensors,
    shape_like,
    shape_of,
    write_config,
    write_tensors,
)

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """What decides a DFlash drafter's arithmetic.

    Without ``injection`` and where ``autoregressive`` it is not DFlash but half of it, which other engines do not load.
    """

    mask_token_id: int
    target_layers: int
    injection: bool = True
    autoregressive: bool = False

    @classmethod
    def for_target(
        cls, target: ModelConfig, identity: str, *, layers: int, block_size: int, mask_token_id: int
    ) -> DFlashConfig:
        """A drafter with the target's own widths, on features spread evenly over its depth."""
        return cls(
            **shape_like(target),
            layers=layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layers=target.layers,
            feature_layers=spread_layers(target.layers, layers),
            target=identity,
        )


class _Nested(Struct, frozen=True):
    mask_token_id: Token
    target_layer_ids: Annotated[list[Token], Meta(min_length=1)]
    block_size: BlockSize | None = None
    num_target_layers: Positive | None = None


class _Redraft(Struct, frozen=True, omit_defaults=True):
    target: str = ""
    injection: bool = True
    autoregressive: bool = False


class _File(ConfigFile, frozen=True, kw_only=True):
    dflash_config: _Nested
    block_size: BlockSize | None = None
    num_target_layers: Positive | None = None
    layer_types: list[str] | None = None
    redraft: _Redraft = _Redraft()


def spread_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layer ids spread evenly from the second to the fourth-last layer, as z-lab's DFlash places them.

    >>> spread_layers(36, 5), spread_layers(30, 3), spread_layers(30, 1)
    ((1, 9, 17, 25, 33), (1, 14, 27), (15,))
    """
    if count == 1:
        return (target_layers // 2,)
    last = target_layers - 3
    return tuple(round(1 + index * (last - 1) / (count - 1)) for index in range(count))


def load_config(folder: Path) -> DFlashConfig:
    """Read ``config.json``; raises `DrafterError` naming what is missing or not supported."""
    file = folder / "config.json"
    config = read_config(folder, ARCHITECTURE, _File)
    nested = config.dflash_config
    check_supported(file, {"layer_types": (set(config.layer_types or ()) - {"full_attention"}, set())})
    block_size = nested.block_size or config.block_size
    target_layers = nested.num_target_layers or config.num_target_layers
    check_given(file, block_size=block_size, num_target_layers=target_layers)
    assert block_size and target_layers
    return DFlashConfig(
        **shape_of(config),
        block_size=block_size,
        mask_token_id=nested.mask_token_id,
        target_layers=target_layers,
        feature_layers=tuple(nested.target_layer_ids),
        target=config.redraft.target,
        injection=config.redraft.injection,
        autoregressive=config.redraft.autoregressive,
    )


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a checkpoint."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate, hidden),
        "mlp.up_proj.weight": (config.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.feature_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_fits(
    config: DFlashConfig, target: ModelConfig, identity: str, where: Path, context_length: int | None = None
) -> None:
    """Raises `DrafterError` naming the first thing in which drafter and target do not belong together.

    ``context_length`` is what will be served of the target's context; None is all of it.
    """
    check_target(config, target, identity, where, context_length)
    check_same(where, num_target_layers=(config.target_layers, target.layers))
    if config.mask_token_id >= config.vocab:
        raise DrafterError(f"{where}: mask_token_id {config.mask_token_id} is outside the vocabulary.")


def check(folder: Path, target: ModelConfig, identity: str, context_length: int | None = None) -> None:
    """Raises `DrafterError` for what configuration and the headers of the weights tell without reading these."""
    config = load_config(folder)
    check_fits(config, target, identity, folder, context_length)
    check_tensors(folder, expected_shapes(config))


def load(folder: Path) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Configuration and tensors, checked against each other; raises `DrafterError`."""
    config = load_config(folder)
    return config, read_tensors(folder, expected_shapes(config))


def save(folder: Path, config: DFlashConfig, tensors: Mapping[str, Tensor], card: str) -> None:
    """Write a checkpoint with its model card; weights are rounded to bf16."""
    own = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * config.layers,
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.feature_layers),
            "block_size": config.block_size,
            "num_target_layers": config.target_layers,
        },
        "redraft": msgspec.to_builtins(_Redraft(config.target, config.injection, config.autoregressive)),
    }
    write_config(folder, config, card, own)
    shapes = expected_shapes(config)
    write_tensors(folder, {name: tensors[name].detach().to("cpu", torch.bfloat16) for name in shapes}, shapes)

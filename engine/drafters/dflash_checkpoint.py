"""DFlash checkpoints on disk, in the format that SGLang loads as ``DFlashDraftModel``.

The backbone is Qwen3-shaped. Embedding and head are the target's, so they are not stored. ``target_layer_ids`` are
0-based: the features of layer i are what leaves it, which Hugging Face calls ``hidden_states[i + 1]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig, read_json
from redraft.engine.drafters.checkpoint import DrafterError, check_tensors, read_tensors, write_tensors

ARCHITECTURE = "DFlashDraftModel"

Positive = Annotated[int, Meta(ge=1)]
Token = Annotated[int, Meta(ge=0)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
BlockSize = Annotated[int, Meta(ge=2, le=64)]


@dataclass(frozen=True)
class DFlashConfig:
    """What decides a DFlash drafter's arithmetic; sizes in elements, ``context_length`` in tokens.

    ``target`` is the identity hash of the one checkpoint it was trained for, empty if the file does not say.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    rms_eps: float
    context_length: int
    block_size: int
    mask_token_id: int
    target_layers: int
    feature_layers: tuple[int, ...]
    target: str = ""
    rope_scaling: None = None

    @classmethod
    def for_target(
        cls, target: ModelConfig, identity: str, *, layers: int, block_size: int, mask_token_id: int
    ) -> DFlashConfig:
        """A drafter with the target's own widths, on features spread evenly over its depth."""
        return cls(
            layers=layers,
            hidden=target.hidden,
            heads=target.heads,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            intermediate=target.intermediate,
            vocab=target.vocab,
            rope_theta=target.rope_theta,
            rms_eps=target.rms_eps,
            context_length=target.context_length,
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


class _Redraft(Struct, frozen=True):
    target: str = ""


class _RopeParameters(Struct, frozen=True):
    rope_theta: Annotated[float, Meta(gt=0)] | None = None
    rope_type: str = "default"


class _File(Struct, frozen=True):
    num_hidden_layers: Layers
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    dflash_config: _Nested
    rms_norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=0)] | None = None
    rope_parameters: _RopeParameters | None = None
    rope_scaling: dict[str, Any] | None = None
    block_size: BlockSize | None = None
    num_target_layers: Positive | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
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
    content = read_json(file)
    if content.get("architectures") != [ARCHITECTURE]:
        raise DrafterError(f"{file}: architectures {content.get('architectures')!r} is no {ARCHITECTURE}.")
    try:
        config = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise DrafterError(f"{file} is not as it should be: {error}.") from error
    rope = config.rope_parameters or _RopeParameters()
    nested = config.dflash_config
    supported = {
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "rope type": (rope.rope_type, "default"),
        "rope_scaling": (config.rope_scaling, None),
        "layer_types": (set(config.layer_types or ()) - {"full_attention"}, set()),
    }
    for name, (value, only) in supported.items():
        if value != only:
            raise DrafterError(f"{file}: {name} {value!r} is not supported.")
    block_size = nested.block_size or config.block_size
    target_layers = nested.num_target_layers or config.num_target_layers
    theta = rope.rope_theta or config.rope_theta
    for name, found in {"block_size": block_size, "num_target_layers": target_layers, "rope_theta": theta}.items():
        if found is None:
            raise DrafterError(f"{file} does not say {name}.")
    assert block_size and target_layers and theta
    if config.num_attention_heads % config.num_key_value_heads:
        raise DrafterError(
            f"{file}: {config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} evenly."
        )
    return DFlashConfig(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        rope_theta=theta,
        rms_eps=config.rms_norm_eps,
        context_length=config.max_position_embeddings,
        block_size=block_size,
        mask_token_id=nested.mask_token_id,
        target_layers=target_layers,
        feature_layers=tuple(nested.target_layer_ids),
        target=config.redraft.target,
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
    for name, ours, theirs in (
        ("vocab_size", config.vocab, target.vocab),
        ("hidden_size", config.hidden, target.hidden),
        ("num_target_layers", config.target_layers, target.layers),
    ):
        if ours != theirs:
            raise DrafterError(f"{where}: {name} is {ours}, the target's is {theirs}; it was made for another model.")
    if config.mask_token_id >= config.vocab:
        raise DrafterError(f"{where}: mask_token_id {config.mask_token_id} is outside the vocabulary.")
    outside = [layer for layer in config.feature_layers if layer >= target.layers]
    if outside or list(config.feature_layers) != sorted(set(config.feature_layers)):
        raise DrafterError(
            f"{where}: target_layer_ids {list(config.feature_layers)} must be ascending and below {target.layers}."
        )
    context_length = context_length or target.context_length
    if config.context_length < context_length:
        raise DrafterError(
            f"{where}: it reaches {config.context_length} tokens, {context_length} are to be served; "
            f"set engine.context_length to {config.context_length} at most."
        )
    if config.target and config.target != identity:
        raise DrafterError(
            f"{where}: trained for the target {config.target[:12]}, this one is {identity[:12]}: weights, tokenizer or "
            "chat template differ. Serve that target, or use drafter: ngram."
        )


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
    content = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.layers,
        "dtype": "bfloat16",
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.feature_layers),
            "block_size": config.block_size,
            "num_target_layers": config.target_layers,
        },
        "redraft": {"target": config.target},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
    shapes = expected_shapes(config)
    write_tensors(folder, {name: tensors[name].detach().to("cpu", torch.bfloat16) for name in shapes}, shapes)

"""What drafter checkpoints on disk have in common: a ``config.json`` and safetensors, every name and shape known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from huggingface_hub import save_torch_state_dict
from msgspec import Meta, Struct
from safetensors import safe_open
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig, open_tensors, read_json
from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.checkpoints.safetensors_file import DTYPE_BYTES, TensorEntry

SHARD_BYTES = 15 << 20
"""Largest file of weights."""

Positive = Annotated[int, Meta(ge=1)]
Token = Annotated[int, Meta(ge=0)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
BlockSize = Annotated[int, Meta(ge=2, le=64)]
PositiveReal = Annotated[float, Meta(gt=0)]


class DrafterError(CheckpointError):
    """A drafter checkpoint that is damaged, unsupported, or made for another target."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What decides any trained drafter's arithmetic; sizes in elements, ``context_length`` in tokens.

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
    feature_layers: tuple[int, ...]
    target: str = ""
    rope_scaling: None = None


class RopeParameters(Struct, frozen=True):
    rope_theta: PositiveReal | None = None
    rope_type: str = "default"


class ConfigFile(Struct, frozen=True, kw_only=True):
    """The keys of ``config.json`` that are alike in all formats."""

    num_hidden_layers: Layers
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    rms_norm_eps: PositiveReal = 1e-6
    rope_theta: PositiveReal | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: dict[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False

    @property
    def rope(self) -> RopeParameters:
        """Of transformers 5, or of before."""
        found = self.rope_parameters or RopeParameters()
        return RopeParameters(found.rope_theta or self.rope_theta, found.rope_type)


File = TypeVar("File", bound=ConfigFile)


def read_config(folder: Path, architecture: str, kind: type[File]) -> File:
    """Read ``config.json``; raises `DrafterError` naming what is missing or not supported."""
    file = folder / "config.json"
    content = read_json(file)
    if content.get("architectures") != [architecture]:
        raise DrafterError(f"{file}: architectures {content.get('architectures')!r} is no {architecture}.")
    try:
        config = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise DrafterError(f"{file} is not as it should be: {error}.") from error
    check_supported(
        file,
        {
            "hidden_act": (config.hidden_act, "silu"),
            "attention_bias": (config.attention_bias, False),
            "rope type": (config.rope.rope_type, "default"),
            "rope_scaling": (config.rope_scaling, None),
        },
    )
    check_given(file, rope_theta=config.rope.rope_theta)
    if config.num_attention_heads % config.num_key_value_heads:
        raise DrafterError(
            f"{file}: {config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} evenly."
        )
    return config


def check_supported(file: Path, found: Mapping[str, tuple[object, object]]) -> None:
    """Raises `DrafterError` for the first key whose value is not the only one supported."""
    for name, (value, only) in found.items():
        if value != only:
            raise DrafterError(f"{file}: {name} {value!r} is not supported.")


def check_given(file: Path, **found: object) -> None:
    """Raises `DrafterError` for the first key that has no value."""
    for name, value in found.items():
        if value is None:
            raise DrafterError(f"{file} does not say {name}.")


def shape_of(config: ConfigFile) -> dict[str, Any]:
    """The fields of `DrafterConfig` that all formats spell alike."""
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
        "rope_theta": config.rope.rope_theta,
        "rms_eps": config.rms_norm_eps,
        "context_length": config.max_position_embeddings,
    }


def shape_like(target: ModelConfig) -> dict[str, Any]:
    """The same fields of a drafter with the target's own widths, but for its layers."""
    names = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "rope_theta", "rms_eps")
    return {name: getattr(target, name) for name in (*names, "context_length")}


def check_target(
    config: DrafterConfig, target: ModelConfig, identity: str, where: Path, context_length: int | None = None
) -> None:
    """Raises `DrafterError` naming the first thing in which any drafter and a target do not belong together.

    ``context_length`` is what will be served of the target's context; None is all of it.
    """
    check_same(where, vocab_size=(config.vocab, target.vocab), hidden_size=(config.hidden, target.hidden))
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


def check_same(where: Path, **sizes: tuple[int, int]) -> None:
    """Raises `DrafterError` for the first size that differs from the target's."""
    for name, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise DrafterError(f"{where}: {name} is {ours}, the target's is {theirs}; it was made for another model.")


def write_config(folder: Path, config: DrafterConfig, card: str, own: Mapping[str, Any]) -> None:
    """Write ``config.json``, with a format's ``own`` keys beside the common ones, and the model card."""
    content = {
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
        "dtype": "bfloat16",
        **own,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def check_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str] | None = None
) -> dict[str, TensorEntry]:
    """Where a folder's tensors are, which must be exactly those of ``shapes``; raises `DrafterError`.

    They are floats but for those of other ``types`` (safetensors' names).
    """
    entries = open_tensors(folder)
    for name, shape in shapes.items():
        if name not in entries:
            raise DrafterError(f"{folder} lacks tensor {name}, which its config.json calls for.")
        if entries[name].shape != shape:
            raise DrafterError(
                f"{entries[name].file}: tensor {name} has shape {list(entries[name].shape)}; "
                f"config.json calls for {list(shape)}."
            )
        allowed = [types[name]] if types and name in types else [*DTYPE_BYTES]
        if entries[name].dtype not in allowed:
            raise DrafterError(
                f"{entries[name].file}: tensor {name} is of type {entries[name].dtype}; "
                f"supported are {', '.join(allowed)}."
            )
    unexpected = sorted(entries.keys() - shapes.keys())
    if unexpected:
        raise DrafterError(f"{entries[unexpected[0]].file}: tensor {unexpected[0]} is not part of such a drafter.")
    return entries


def read_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The tensors of a folder, which must be exactly those of ``shapes``; raises `DrafterError`."""
    entries = check_tensors(folder, shapes, types)
    tensors = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with safe_open(file, framework="pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name, entry in entries.items() if entry.file == file})
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DrafterError(f"{entries[name].file}: tensor {name} has values that are not finite.")
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the tensors of ``shapes`` in files of at most SHARD_BYTES each, with an index if there are several."""
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise DrafterError(f"tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}.")
    state = {name: tensors[name].contiguous() for name in shapes}
    save_torch_state_dict(state, folder, max_shard_size=SHARD_BYTES)

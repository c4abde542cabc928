"""Hugging Face checkpoint folders: their configuration, their tensors, and whether both are as they should be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.checkpoints.safetensors_file import DTYPE_BYTES, TensorEntry, read_header

Architecture = Literal["llama", "qwen3"]
_ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling (``rope_type: llama3``); context lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True)
class ModelConfig:
    """What decides a target's arithmetic; sizes in elements, ``context_length`` in tokens."""

    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    rms_eps: float
    context_length: int
    tie_word_embeddings: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, or say what is wrong with the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} has no {file.name}; it is not a complete checkpoint.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: it is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is corrupt: a JSON object was expected.")
    return content


def load_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json``; refuse by name whatever is not supported."""
    file = folder / "config.json"
    config = read_json(file)

    def number(name: str, default: float | None = None) -> float:
        value = config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{file}: {name} should be a positive number, not {value!r}.")
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = number(name, default)
        if not isinstance(value, int):
            raise CheckpointError(f"{file}: {name} should be a whole number, not {value!r}.")
        return value

    architectures = config.get("architectures") or []
    architecture = next((_ARCHITECTURES[name] for name in architectures if name in _ARCHITECTURES), None)
    if architecture is None:
        raise CheckpointError(
            f"{file}: architecture {', '.join(map(str, architectures)) or 'unnamed'} is not supported; "
            f"supported are {' and '.join(_ARCHITECTURES)}."
        )
    _refuse_unsupported(config, file)
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    kv_heads = integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{file}: {heads} attention heads cannot share {kv_heads} key/value heads evenly.")
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"{file}: hidden_size {hidden} is not a multiple of {heads} attention heads.")
    rope = _rope_parameters(config)
    rope_theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if isinstance(rope_theta, bool) or not isinstance(rope_theta, int | float) or rope_theta <= 0:
        raise CheckpointError(f"{file}: rope_theta should be a positive number, not {rope_theta!r}.")
    return ModelConfig(
        architecture=architecture,
        layers=integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=integer("head_dim", hidden // heads),
        intermediate=integer("intermediate_size"),
        vocab=integer("vocab_size"),
        rope_theta=float(rope_theta),
        rope_scaling=_rope_scaling(rope, file),
        rms_eps=float(number("rms_norm_eps", 1e-6)),
        context_length=integer("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_ids=eos_ids(folder),
        bos_id=config.get("bos_token_id"),
    )


def _refuse_unsupported(config: Mapping[str, Any], file: Path) -> None:
    required = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    for name, supported in required.items():
        if config.get(name, supported) != supported:
            raise CheckpointError(f"{file}: {name} {config[name]!r} is not supported, only {supported!r}.")
    if config.get("quantization_config"):
        raise CheckpointError(f"{file}: quantized weights are not supported; use a bf16, fp16 or fp32 checkpoint.")


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: ``rope_parameters`` (transformers 5), or ``rope_scaling`` beside a top-level ``rope_theta``."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_scaling(rope: Mapping[str, Any], file: Path) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{file}: rope type {kind!r} is not supported, only 'default' and 'llama3'.")
    try:
        return Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context_length=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{file}: rope type 'llama3' needs {error.args[0]}.") from error


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Every token that ends an answer: those of ``config.json`` and of ``generation_config.json`` together."""
    ids: set[int] = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(file).get("eos_token_id") if file.exists() else None
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in listed):
            raise CheckpointError(f"{file}: eos_token_id should be a token id or a list of them, not {value!r}.")
        ids.update(listed)
    return tuple(sorted(ids))


def chat_templates(folder: Path) -> dict[str, str]:
    """Chat templates by name (``default``, perhaps ``tool_use``), from ``chat_template.jinja`` or
    ``tokenizer_config.json``; empty for a model that is not made to chat."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    config = folder / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {"default": template}


def open_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Map every tensor's name to the safetensors file that holds it, its type, shape and place there.

    Reads headers only; load a tensor with safetensors' own ``safe_open(entry.file, …).get_tensor(name)``.
    """
    index_file = folder / _INDEX
    if (folder / _WEIGHTS).exists():
        return read_header(folder / _WEIGHTS)
    if not index_file.exists():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        reason = (
            f"{pickled[0]} is a pickle, which can run code when loaded; convert it to safetensors first."
            if pickled
            else "it is not a complete checkpoint."
        )
        raise CheckpointError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}: {reason}")
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index_file} is corrupt: it has no weight_map from tensor names to file names.")
    shards: dict[str, dict[str, TensorEntry]] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index_file} is corrupt: shard {name!r} lies outside the folder.")
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} lacks the shard {name} that {_INDEX} names; fetch the checkpoint again.")
        shards[name] = read_header(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{folder / name} lacks tensor {tensor}, which {_INDEX} places there.")
    return {tensor: entry for shard in shards.values() for tensor, entry in shard.items()}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape, in Hugging Face's terms, of every tensor a checkpoint of this configuration must hold."""
    hidden, intermediate = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.architecture == "qwen3":
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[_LM_HEAD] = (config.vocab, hidden)
    for i in range(config.layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def validate(folder: Path) -> ModelConfig:
    """Prove from configuration and headers that a checkpoint can be loaded; the weights themselves are not read."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.")
    config = load_config(folder)
    tensors = open_tensors(folder)
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks tensor {name}, which its config.json calls for.")
        entry = tensors[name]
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}; config.json calls for {list(shape)}."
            )
        if entry.dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is of type {entry.dtype}; supported are {', '.join(DTYPE_BYTES)}."
            )
    # A tied head stored twice is what some exporters do, and rotary tables are what old ones did: both are derived.
    unexpected = sorted(
        name
        for name in tensors.keys() - expected.keys()
        if not (name == _LM_HEAD and config.tie_word_embeddings) and not name.endswith("rotary_emb.inv_freq")
    )
    if unexpected:
        raise CheckpointError(
            f"{tensors[unexpected[0]].file}: tensor {unexpected[0]} is not part of a {config.architecture} model"
            + (f" (nor are {len(unexpected) - 1} others)." if len(unexpected) > 1 else ".")
        )
    read_json(folder / "tokenizer.json")
    return config

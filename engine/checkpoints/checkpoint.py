"""Hugging Face checkpoint folders: their configuration, their tensors, and whether both are as they should be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.checkpoints.safetensors_file import DTYPE_BYTES, TensorEntry, read_header

Architecture = Literal["llama", "qwen3"]
_ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
T = TypeVar("T")
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
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no plain file.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} has no {file.name}; it is not a complete checkpoint.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is corrupt: it is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is corrupt: a JSON object was expected.")
    return content


Positive = Annotated[int, Meta(ge=1)]
PositiveReal = Annotated[float, Meta(gt=0)]


class _Rope(Struct):
    """``rope_parameters`` of transformers 5, which has ``rope_theta`` inside, or ``rope_scaling`` of before."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveReal | None = None
    factor: PositiveReal | None = None
    low_freq_factor: PositiveReal | None = None
    high_freq_factor: PositiveReal | None = None
    original_max_position_embeddings: Positive | None = None


class _ConfigFile(Struct):
    hidden_size: Positive
    intermediate_size: Positive
    max_position_embeddings: Positive
    num_attention_heads: Positive
    num_hidden_layers: Positive
    vocab_size: Positive
    architectures: list[str] | None = None
    attention_bias: bool | None = False
    bos_token_id: int | None = None
    head_dim: Positive | None = None
    hidden_act: str = "silu"
    mlp_bias: bool | None = False
    num_key_value_heads: Positive | None = None
    quantization_config: dict[str, Any] | None = None
    rms_norm_eps: PositiveReal = 1e-6
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope_theta: PositiveReal | None = None
    tie_word_embeddings: bool = False
    use_sliding_window: bool | None = False


class _EndTokens(Struct):
    eos_token_id: int | list[int] | None = None


class _NamedTemplate(Struct):
    name: str
    template: str


class _Templates(Struct):
    chat_template: str | list[_NamedTemplate] | None = None


def _read_as(kind: type[T], file: Path) -> T:
    try:
        return msgspec.convert(read_json(file), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file} is not as it should be: {error}.") from error


def load_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json``; refuse by name whatever is not supported."""
    file = folder / "config.json"
    architectures = read_json(file).get("architectures")
    architecture = next((kind for name, kind in _ARCHITECTURES.items() if architectures == [name]), None)
    if architecture is None:
        raise CheckpointError(
            f"{file}: architectures {architectures!r} is not supported, only {' and '.join(_ARCHITECTURES)}."
        )
    config = _read_as(_ConfigFile, file)
    _refuse_unsupported(config, file)
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % kv_heads:
        raise CheckpointError(
            f"{file}: {config.num_attention_heads} attention heads cannot share {kv_heads} key/value heads evenly."
        )
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise CheckpointError(
            f"{file}: hidden_size {config.hidden_size} is not a multiple of {config.num_attention_heads} heads."
        )
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    return ModelConfig(
        architecture=architecture,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        rope_theta=rope.rope_theta or config.rope_theta or 10_000.0,
        rope_scaling=_rope_scaling(rope, file),
        rms_eps=config.rms_norm_eps,
        context_length=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_ids=eos_ids(folder),
        bos_id=config.bos_token_id,
    )


def _refuse_unsupported(config: _ConfigFile, file: Path) -> None:
    supported = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    for name, only in supported.items():
        if (value := getattr(config, name)) not in (only, None):
            raise CheckpointError(f"{file}: {name} {value!r} is not supported, only {only!r}.")
    if config.quantization_config:
        raise CheckpointError(f"{file}: quantized weights are not supported; use a bf16, fp16 or fp32 checkpoint.")


def _rope_scaling(rope: _Rope, file: Path) -> Llama3RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{file}: rope type {kind!r} is not supported, only 'default' and 'llama3'.")

    def needed(name: str) -> Any:
        value = getattr(rope, name)
        if value is None:
            raise CheckpointError(f"{file}: rope type 'llama3' needs {name}.")
        return value

    return Llama3RopeScaling(
        factor=needed("factor"),
        low_freq_factor=needed("low_freq_factor"),
        high_freq_factor=needed("high_freq_factor"),
        original_context_length=needed("original_max_position_embeddings"),
    )


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Every token that ends an answer: those of ``config.json`` and of ``generation_config.json`` together."""
    ids: set[int] = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        value = _read_as(_EndTokens, file).eos_token_id if file.exists() else None
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def chat_template(folder: Path) -> str | None:
    """The one template that conversations are rendered with; None for a model that is not made to chat.

    It is ``chat_template.jinja``, else that of ``tokenizer_config.json``: of several, ``tool_use`` before ``default``.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
    config = folder / "tokenizer_config.json"
    template = _read_as(_Templates, config).chat_template if config.exists() else None
    if isinstance(template, list):
        named = {entry.name: entry.template for entry in template}
        return named.get("tool_use", named.get("default"))
    return template


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

"""A llama.cpp GGUF of a Llama, turned into a Hugging Face folder with bf16 weights.

Equal to what transformers makes of the same file, bit for bit, but for the tokenizer's digit splitting, which
transformers leaves out and the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.engine.checkpoints.bf16 import to_bf16
from redraft.engine.checkpoints.safetensors_file import write_bf16

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3


def convert(gguf_file: Path, folder: Path, chat_template: str, written: Callable[[int, int], None]) -> None:
    """Write the GGUF's model into ``folder``; ``written`` is told the bytes of weights done and in all."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    _write_weights(reader, folder / "model.safetensors", written)
    _write_configs(reader, folder)
    _write_tokenizer(reader, folder)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _write_weights(reader: GGUFReader, file: Path, written: Callable[[int, int], None]) -> None:
    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    sources = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(n) for n in reversed(sources[name].shape)) for name in sorted(sources)}
    total = 2 * sum(int(tensor.n_elements) for tensor in reader.tensors)

    def tensors() -> Iterator[memoryview]:
        for name in shapes:
            yield _bf16_bytes(sources[name], heads)

    write_bf16(file, shapes, tensors(), lambda done: written(done, total))


def _bf16_bytes(tensor: ReaderTensor, heads: dict[str, int]) -> memoryview:
    import numpy as np
    from gguf import dequantize

    weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    part = tensor.name.split(".")[-2]
    if part in heads:  # llama.cpp interleaves the two halves of each head for its rotary layout; undo that
        pairs = weights.reshape(heads[part], weights.shape[0] // heads[part] // 2, 2, *weights.shape[1:])
        weights = pairs.swapaxes(1, 2).reshape(weights.shape)
    return to_bf16(np.ascontiguousarray(weights)).data.cast("B")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_configs(reader: GGUFReader, folder: Path) -> None:
    hidden = _field(reader, "llama.embedding_length")
    heads = _field(reader, "llama.attention.head_count")
    token_ids = {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rope_parameters": {"rope_theta": _field(reader, "llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": _field(reader, "llama.vocab_size"),
        **token_ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_ids)


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    first, second = zip(*(merge.split(" ", 1) for merge in merges), strict=True)
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(zip(first, second, strict=True)))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
            "model_max_length": _field(reader, "llama.context_length"),
            "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        },
    )

"""Checkpoints small enough to make for every test, and a way to write them that is not the product's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from redraft.engine.checkpoints.checkpoint import expected_shapes, load_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'


def _tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors that ``LLAMA`` calls for, of values that every float type holds exactly."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randint(-32, 33, shape, generator=generator) / 16).to(dtype)

    named = {"model.embed_tokens.weight": random(32, 16), "model.norm.weight": random(16)}
    for i in range(2):
        layer = f"model.layers.{i}"
        named |= {
            f"{layer}.input_layernorm.weight": random(16),
            f"{layer}.self_attn.q_proj.weight": random(16, 16),
            f"{layer}.self_attn.k_proj.weight": random(8, 16),
            f"{layer}.self_attn.v_proj.weight": random(8, 16),
            f"{layer}.self_attn.o_proj.weight": random(16, 16),
            f"{layer}.post_attention_layernorm.weight": random(16),
            f"{layer}.mlp.gate_proj.weight": random(24, 16),
            f"{layer}.mlp.up_proj.weight": random(24, 16),
            f"{layer}.mlp.down_proj.weight": random(16, 24),
        }
    return named


def _write_shards(folder: Path, named: dict[str, torch.Tensor], shards: int) -> None:
    """Save tensors over several files with an index, as Hugging Face does for large models."""
    names = sorted(named)
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: named[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Returns a function that writes a valid checkpoint, or one that is wrong in the way asked for.

    ``config`` changes keys of ``config.json`` (None removes one), ``edit`` changes the tensors in place before they
    are written, to one file or to ``shards``.
    """
    made = 0

    def make(
        config: dict[str, Any] | None = None,
        edit: Callable[[dict[str, torch.Tensor]], object] = lambda named: None,
        dtype: torch.dtype = torch.bfloat16,
        shards: int = 0,
    ) -> Path:
        nonlocal made
        made += 1
        folder = tmp_path / f"checkpoint{made}"
        folder.mkdir()
        keys = {key: value for key, value in (LLAMA | (config or {})).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(keys))
        (folder / "tokenizer.json").write_text(TOKENIZER)
        named = _tensors(dtype)
        edit(named)
        if shards:
            _write_shards(folder, named, shards)
        else:
            save_file(named, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes an adapter of rank 4 for a checkpoint made by ``make_checkpoint``.

    ``config`` changes keys of ``adapter_config.json`` (None removes one), ``edit`` changes the tensors in place.
    """
    made = 0

    def make(
        base: Path,
        config: dict[str, Any] | None = None,
        edit: Callable[[dict[str, torch.Tensor]], object] = lambda named: None,
    ) -> Path:
        nonlocal made
        made += 1
        folder = tmp_path / f"adapter{made}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(5)
        named = {}
        for name, (rows, *columns) in expected_shapes(load_config(base)).items():
            module = name.removesuffix(".weight")
            if module.endswith("_proj"):
                stem = f"base_model.model.{module}"
                named[f"{stem}.lora_A.weight"] = torch.randn(4, *columns, generator=generator).bfloat16()
                named[f"{stem}.lora_B.weight"] = torch.randn(rows, 4, generator=generator).bfloat16()
        edit(named)
        keys = {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "bias": "none",
            "use_dora": False,
            "modules_to_save": None,
        }
        keys["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        keys = {key: value for key, value in (keys | (config or {})).items() if value is not None}
        (folder / "adapter_config.json").write_text(json.dumps(keys))
        save_file(named, folder / "adapter_model.safetensors")
        return folder

    return make

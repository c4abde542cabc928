"""A checkpoint is understood, or refused with a message that says which file or tensor is wrong and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from redraft.engine.chat.renderer import Renderer
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints import (
    CheckpointError,
    Llama3RopeScaling,
    expected_shapes,
    identity,
    load_config,
    open_tensors,
    validate,
)

pytestmark = pytest.mark.unit
MakeCheckpoint = Callable[..., Path]
LLAMA_KEYS = [
    "architectures",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_both_config_schemas_are_understood_alike(make_checkpoint: MakeCheckpoint) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    new = {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}
    config = load_config(make_checkpoint(old))
    assert config == load_config(make_checkpoint(new))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 64)


def test_what_a_config_leaves_out_takes_the_fields_defaults(make_checkpoint: MakeCheckpoint) -> None:
    config = load_config(make_checkpoint({"num_key_value_heads": None, "rope_theta": None, "bos_token_id": None}))
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.bos_id) == (4, 4, 10_000.0, None)
    assert config.rope_scaling is None


def test_every_end_token_of_both_files_ends_an_answer(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"eos_token_id": 2})
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load_config(folder).eos_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, r"architectures \[\]"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"hidden_size": -16}, "hidden_size"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": 18}, "not a multiple of 4 heads"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    make_checkpoint: MakeCheckpoint, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json.*" + named):
        load_config(make_checkpoint(changes))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": \xff}'])
def test_a_config_that_is_no_json_object_is_corrupt(make_checkpoint: MakeCheckpoint, text: str) -> None:
    folder = make_checkpoint()
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json is corrupt"):
        load_config(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=12), values, max_size=3),
    max_leaves=6,
)
FILES = {
    "config.json": [*LLAMA_KEYS, "rope_scaling", "rope_parameters", "head_dim", "quantization_config"],
    "generation_config.json": ["eos_token_id"],
    "tokenizer_config.json": ["chat_template", "bos_token", "eos_token"],
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(data=st.data())
def test_no_value_in_a_json_file_escapes_as_another_error(make_checkpoint: MakeCheckpoint, data: st.DataObject) -> None:
    folder = make_checkpoint()
    file = folder / data.draw(st.sampled_from(sorted(FILES)))
    content = json.loads(file.read_text()) if file.exists() else {}
    content[data.draw(st.sampled_from(FILES[file.name]))] = data.draw(json_values)
    file.write_text(json.dumps(content))
    for read in (validate, identity, Renderer.from_folder, Tokenizer.from_folder):
        try:
            read(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)


def test_a_whole_checkpoint_is_valid_in_one_file_or_many(make_checkpoint: MakeCheckpoint) -> None:
    single, sharded = make_checkpoint(), make_checkpoint(shards=3)
    assert validate(single) == validate(sharded)
    assert open_tensors(single).keys() == open_tensors(sharded).keys() == expected_shapes(load_config(single)).keys()


def test_the_map_of_tensors_serves_safetensors_own_loader(make_checkpoint: MakeCheckpoint) -> None:
    whole = load_file(make_checkpoint() / "model.safetensors")
    for name, entry in open_tensors(make_checkpoint(shards=3)).items():
        with safe_open(entry.file, framework="pt") as file:
            assert torch.equal(file.get_tensor(name), whole[name])
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            assert stream.read(entry.stop - entry.start) == whole[name].view(torch.uint8).numpy().tobytes()


LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda named: named.pop(LAYER), f"lacks tensor {LAYER}"),
        (lambda named: named.update({LAYER: torch.zeros(24, 17)}), rf"{LAYER} has shape \[24, 17\].*\[24, 16\]"),
        (lambda named: named.update({LAYER: torch.zeros(24, 16, dtype=torch.int8)}), f"{LAYER} is of type I8.*BF16"),
        (lambda named: named.update({"model.bias": torch.zeros(3)}), "tensor model.bias is not part of a llama model"),
    ],
    ids=["missing", "wrong shape", "wrong type", "unexpected"],
)
@pytest.mark.parametrize("shards", [0, 2])
def test_a_wrong_tensor_is_named_with_what_was_expected(
    make_checkpoint: MakeCheckpoint, edit: Callable[[dict[str, torch.Tensor]], object], message: str, shards: int
) -> None:
    with pytest.raises(CheckpointError, match=message):
        validate(make_checkpoint(edit=edit, shards=shards))


def test_an_untied_head_is_required_and_a_tied_one_allowed(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=r"lacks tensor lm_head\.weight"):
        validate(make_checkpoint({"tie_word_embeddings": False}))
    validate(make_checkpoint(edit=lambda named: named.update({"lm_head.weight": torch.zeros(32, 16)})))


def test_qwen3_needs_its_head_norms(make_checkpoint: MakeCheckpoint) -> None:
    def add_norms(named: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            for norm in ("q_norm", "k_norm"):
                named[f"model.layers.{i}.self_attn.{norm}.weight"] = torch.ones(4)

    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert validate(make_checkpoint(qwen3, add_norms)).architecture == "qwen3"
    with pytest.raises(CheckpointError, match="q_norm"):
        validate(make_checkpoint(qwen3))
    with pytest.raises(CheckpointError, match=r"k_norm.* is not part of a llama model"):
        validate(make_checkpoint(edit=add_norms))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_refused_wherever_it_ends(make_checkpoint: MakeCheckpoint, data: st.DataObject) -> None:
    folder = make_checkpoint()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (truncated|corrupt)"):
        validate(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_header_never_escapes_as_another_error(make_checkpoint: MakeCheckpoint, data: st.DataObject) -> None:
    folder = make_checkpoint()
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    for at in data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=8)):
        content[at] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        validate(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "BF16", "shape": null, "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": ["x"], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": ["0", 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [-8, -6]}}',
        b'{"a": {"dtype": ["BF16"], "shape": [1], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [-1, -1], "data_offsets": [0, 2]}}',
    ],
)
def test_a_header_of_the_wrong_form_is_corrupt(make_checkpoint: MakeCheckpoint, header: bytes) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match="is corrupt"):
        validate(folder)


def test_a_missing_shard_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shard model-00002-of-00003\.safetensors"):
        validate(folder)


def test_an_index_that_disagrees_with_its_shards_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    shards = set(index["weight_map"].values())
    assert len(shards) == 2
    index["weight_map"]["model.embed_tokens.weight"] = (shards - {index["weight_map"]["model.norm.weight"]}).pop()
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.\w+\.weight, which .*index\.json"):
        validate(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../b"}}])
def test_a_corrupt_index_is_refused(make_checkpoint: MakeCheckpoint, index: dict[str, Any]) -> None:
    folder = make_checkpoint(shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json is corrupt"):
        validate(folder)


def test_pickled_weights_are_refused_with_the_reason(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, which can run code"):
        validate(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(make_checkpoint: MakeCheckpoint, file: str) -> None:
    folder = make_checkpoint()
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        validate(folder)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        validate(tmp_path / "nothing")


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_transformers_saves_is_valid(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, num_key_value_heads=2, head_dim=16, vocab_size=128, max_position_embeddings=256
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    read = validate(tmp_path)
    assert (read.architecture, read.layers, read.hidden, read.head_dim, read.kv_heads) == (kind, 2, 64, 16, 2)

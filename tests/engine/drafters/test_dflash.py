from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redraft.engine.checkpoints.checkpoint import load_config as load_target_config
from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.checkpoints.identity import identity
from redraft.engine.drafters.checkpoint import SHARD_BYTES
from redraft.engine.drafters.dflash_checkpoint import check_fits, expected_shapes, load, load_config, save

pytestmark = pytest.mark.unit
MakeDFlash = Callable[..., Path]


@pytest.fixture
def folder(make_dflash: MakeDFlash, tiny_checkpoint: Path) -> Path:
    return make_dflash(tiny_checkpoint)


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if key in content["dflash_config"]:
            content["dflash_config"][key] = value
        else:
            content[key] = value
    (folder / "config.json").write_text(json.dumps(content))


def test_what_is_saved_is_what_is_loaded(folder: Path, tmp_path: Path) -> None:
    config, tensors = load(folder)
    save(tmp_path, config, tensors, card="")
    again, same = load(tmp_path)
    assert again == config
    assert tensors.keys() == same.keys() == expected_shapes(config).keys()
    assert all(torch.equal(tensors[name], same[name]) for name in tensors)


def test_weights_are_written_in_files_small_enough_to_keep_in_a_repository(
    make_dflash: MakeDFlash, tiny_checkpoint: Path
) -> None:
    folder = make_dflash(tiny_checkpoint, layers=3, intermediate=40_000)
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size <= SHARD_BYTES + 4096 for file in files)
    config, tensors = load(folder)
    assert tensors["layers.2.mlp.up_proj.weight"].shape == (40_000, config.hidden)


def test_the_rotation_is_read_under_both_of_the_field_s_spellings(folder: Path) -> None:
    expected = load_config(folder).rope_theta
    content = json.loads((folder / "config.json").read_text())
    for key in ("rope_theta", "rope_parameters"):
        one = {name: value for name, value in content.items() if name != key}
        (folder / "config.json").write_text(json.dumps(one))
        assert load_config(folder).rope_theta == expected
    neither = {name: value for name, value in content.items() if not name.startswith("rope_")}
    (folder / "config.json").write_text(json.dumps(neither))
    with pytest.raises(CheckpointError, match="rope_theta"):
        load_config(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 321}, "vocab_size is 321, the target's is 320"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"num_target_layers": 36}, "num_target_layers is 36"),
        ({"target_layer_ids": [0, 2]}, r"target_layer_ids \[0, 2\]"),
        ({"target_layer_ids": [1, 0]}, "ascending"),
        ({"mask_token_id": 320}, "mask_token_id 320"),
        ({"max_position_embeddings": 100}, "reaches 100 tokens"),
        ({"redraft": {"target": "0" * 64}}, "trained for the target 000000000000"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_the_first_thing_that_differs(
    folder: Path, tiny_checkpoint: Path, changes: dict[str, Any], named: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=named):
        check_fits(load_config(folder), load_target_config(tiny_checkpoint), identity(tiny_checkpoint), folder)


def test_a_drafter_of_less_context_serves_what_it_reaches(folder: Path, tiny_checkpoint: Path) -> None:
    edit(folder, max_position_embeddings=100)
    config, target = load_config(folder), load_target_config(tiny_checkpoint)
    check_fits(config, target, identity(tiny_checkpoint), folder, context_length=100)
    with pytest.raises(CheckpointError, match=r"engine\.context_length to 100 at most"):
        check_fits(config, target, identity(tiny_checkpoint), folder, context_length=101)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no DFlashDraftModel"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 10**9}, "block_size"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"dflash_config": {}}, "mask_token_id"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=named):
        load_config(folder)


def test_tensors_that_are_missing_misshapen_or_unknown_are_named(folder: Path) -> None:
    edit(folder, intermediate_size=161)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape \[160, 96\]; .* \[161, 96\]"):
        load(folder)
    edit(folder, intermediate_size=160, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks tensor layers\.2\."):
        load(folder)
    edit(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"layers\.1\.\S+ is not part"):
        load(folder)


def test_weights_that_are_no_floats_are_refused(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor.to(torch.int64) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="is of type I64"):
        load(folder)


def test_a_pickle_is_refused(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle"):
        load(folder)

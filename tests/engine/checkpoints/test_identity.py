"""One model has one identity, however its files are cut; another model has another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redraft.engine.checkpoints import CheckpointError, identity
from redraft.engine.checkpoints.bf16 import to_bf16
from redraft.engine.checkpoints.checkpoint import chat_template

pytestmark = pytest.mark.unit
MakeCheckpoint = Callable[..., Path]
NORM = "model.norm.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shards", [0, 2, 5])
def test_files_and_float_types_do_not_matter(make_checkpoint: MakeCheckpoint, dtype: torch.dtype, shards: int) -> None:
    plain = make_checkpoint()
    assert identity(make_checkpoint(dtype=dtype, shards=shards)) == identity(plain)


def test_fp32_weights_count_as_the_bf16_they_are_served_in(make_checkpoint: MakeCheckpoint) -> None:
    def add_a_little(named: dict[str, torch.Tensor]) -> None:
        named[NORM] = torch.full((16,), 1.0 + 2**-10)

    def round_it(named: dict[str, torch.Tensor]) -> None:
        named[NORM] = torch.ones(16, dtype=torch.bfloat16)

    assert identity(make_checkpoint(edit=add_a_little)) == identity(make_checkpoint(edit=round_it))


def test_a_tied_head_counts_once(make_checkpoint: MakeCheckpoint) -> None:
    doubled = make_checkpoint(
        edit=lambda named: named.update({"lm_head.weight": named["model.embed_tokens.weight"].clone()})
    )
    assert identity(doubled) == identity(make_checkpoint())


def _flip_a_bit(named: dict[str, torch.Tensor]) -> None:
    named[NORM].view(torch.int16)[5] ^= 1


def _swap_two_tensors(named: dict[str, torch.Tensor]) -> None:
    first, second = (f"model.layers.0.self_attn.{name}.weight" for name in ("k_proj", "v_proj"))
    named[first], named[second] = named[second], named[first]


@pytest.mark.parametrize("edit", [_flip_a_bit, _swap_two_tensors])
def test_any_change_of_weights_is_another_model(
    make_checkpoint: MakeCheckpoint, edit: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    assert identity(make_checkpoint(edit=edit)) != identity(make_checkpoint())


def test_tokenizer_and_template_are_part_of_it(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    seen = [identity(folder)]
    (folder / "tokenizer.json").write_text("{}")
    seen.append(identity(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.append(identity(folder))
    assert len(set(seen)) == 3


def test_where_the_template_is_kept_does_not_matter(make_checkpoint: MakeCheckpoint) -> None:
    template = "{{ messages }}"
    beside, inside, listed = make_checkpoint(), make_checkpoint(), make_checkpoint()
    (beside / "chat_template.jinja").write_text(template)
    (inside / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (listed / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": template}]})
    )
    assert identity(beside) == identity(inside) == identity(listed)


def test_a_damaged_checkpoint_has_none(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=NORM):
        identity(make_checkpoint(edit=lambda named: named.pop(NORM)))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_rounding_to_bf16_is_pytorchs(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    ours = torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


def test_of_several_templates_the_one_that_is_rendered_counts(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    tools, plain = ({"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": "{{ messages }}"})

    def with_templates(*templates: dict[str, str]) -> str:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": list(templates)}))
        return identity(folder)

    (folder / "chat_template.jinja").unlink(missing_ok=True)
    both = with_templates(tools, plain)
    assert chat_template(folder) == "{{ tools }}"
    assert with_templates(tools) == both
    assert with_templates(plain) != both
    assert with_templates({**tools, "template": "{{ tools }}!"}, plain) != both

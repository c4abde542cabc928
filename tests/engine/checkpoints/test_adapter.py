"""A merge gives the same bits everywhere, or says what about the adapter is not as it should be."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from redraft.engine.checkpoints import AdapterError, CheckpointError, identity, merge, validate
from redraft.engine.checkpoints.bf16 import from_bf16, to_bf16

pytestmark = pytest.mark.unit
MakeCheckpoint = Callable[..., Path]
MakeAdapter = Callable[..., Path]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_an_adapter_of_nothing_changes_nothing(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    def zero(named: dict[str, torch.Tensor]) -> None:
        named.update({name: torch.zeros_like(tensor) for name, tensor in named.items() if "lora_B" in name})

    base = make_checkpoint()
    assert merge(base, make_adapter(base, edit=zero), tmp_path / "out") == identity(base)


@pytest.mark.parametrize("base", [{}, {"shards": 2}, {"dtype": torch.float32}])
def test_every_weight_is_the_exact_sum_rounded_once(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path, base: dict[str, Any]
) -> None:
    folder = make_checkpoint(**base)
    adapter = make_adapter(folder)
    assert merge(folder, adapter, tmp_path / "out") == identity(tmp_path / "out")
    before = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    after = load_file(tmp_path / "out" / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        weight = before[name].double()
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in matrices:
            weight = (
                weight + 2.0 * matrices[f"{stem}.lora_B.weight"].double() @ matrices[f"{stem}.lora_A.weight"].double()
            )
            assert not torch.equal(tensor, before[name].bfloat16())
        assert torch.equal(tensor, weight.bfloat16()), name


def test_the_same_merge_gives_the_same_identity_whatever_the_threads(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = make_checkpoint()
    adapter = make_adapter(base)
    first = merge(base, adapter, tmp_path / "out")
    code = f"""
        from pathlib import Path
        from redraft.engine.checkpoints.adapter import merge
        print(merge(Path({str(base)!r}), Path({str(adapter)!r}), Path({str(tmp_path / "again")!r})))
    """
    for threads in ("1", "3"):
        again = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        assert again.stdout.strip() == first


def test_a_merge_needs_no_more_than_numpy_and_msgspec(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = make_checkpoint()
    code = f"""
        import sys
        from pathlib import Path
        allowed = {{"numpy", "msgspec", "safetensors", "redraft", *sys.stdlib_module_names}}
        class Nothing:
            def find_spec(self, name, path=None, target=None):
                top = name.partition(".")[0]
                if top not in allowed and not top.startswith("_"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Nothing())
        from redraft.engine.checkpoints.adapter import merge
        merge(Path({str(base)!r}), Path({str(make_adapter(base))!r}), Path({str(tmp_path / "out")!r}))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    validate(tmp_path / "out")


def test_what_is_no_weight_is_the_bases(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = make_checkpoint(shards=2)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "redraft.json").write_text("{}")
    merge(base, make_adapter(base), tmp_path / "out")
    copied = {file.name: file.read_text() for file in (tmp_path / "out").iterdir() if file.suffix != ".safetensors"}
    names = ("config.json", "tokenizer.json", "chat_template.jinja")
    assert copied == {name: (base / name).read_text() for name in names}


def _rename(named: dict[str, torch.Tensor]) -> None:
    named[Q.replace("q_proj", "qkv_proj") + ".lora_A.weight"] = named.pop(f"{Q}.lora_A.weight")


def _add(named: dict[str, torch.Tensor]) -> None:
    named["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 16, dtype=torch.bfloat16)


def _widen(named: dict[str, torch.Tensor]) -> None:
    named[f"{Q}.lora_A.weight"] = torch.zeros(4, 17, dtype=torch.bfloat16)


def _fp32(named: dict[str, torch.Tensor]) -> None:
    named.update({name: tensor.float() for name, tensor in named.items()})


@pytest.mark.parametrize(
    ("config", "edit", "said"),
    [
        ({"target_modules": ["qkv_proj"]}, None, r"target_modules \['qkv_proj'\] are not linear layers.*q_proj"),
        ({"target_modules": []}, None, r"target_modules \[\]"),
        ({"target_modules": "all-linear"}, None, "target_modules"),
        ({"r": None}, None, "missing required field `r`"),
        ({"r": 32, "lora_alpha": 64}, None, r"r 32 and lora_alpha 64 are not supported: r must be at most 16"),
        ({"lora_alpha": 12}, None, r"lora_alpha / r a power of two"),
        ({"use_dora": True}, None, "use_dora True is not supported, only False"),
        ({"peft_type": "IA3"}, None, "peft_type 'IA3' is not supported, only 'LORA'"),
        ({"bias": "all"}, None, "bias 'all' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, None, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
        ({}, _rename, rf"lacks tensor {Q}\.lora_A\.weight"),
        ({}, _add, r"lm_head\.lora_A\.weight belongs to none of the target modules"),
        ({}, _widen, r"BF16 of shape \[4, 17\].*calls for BF16 \[4, 16\]"),
        ({}, _fp32, "is F32 of shape"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    make_checkpoint: MakeCheckpoint,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    config: dict[str, Any],
    edit: Callable[[dict[str, torch.Tensor]], None] | None,
    said: str,
) -> None:
    base = make_checkpoint()
    adapter = make_adapter(base, config=config, **({"edit": edit} if edit else {}))
    with pytest.raises(AdapterError, match=said):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickled_adapter_is_never_opened(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = make_checkpoint()
    adapter = make_adapter(base)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle, which can run code"):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("bytes_kept", [0, 7, 500])
def test_a_truncated_adapter_is_refused(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path, bytes_kept: int
) -> None:
    base = make_checkpoint()
    file = make_adapter(base) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_kept])
    with pytest.raises(CheckpointError, match="truncated"):
        merge(base, file.parent, tmp_path / "out")


def test_doubles_are_rounded_to_bf16_once() -> None:
    """Through float32, 1 + 2^-8 + 2^-40 would become the tie 1 + 2^-8 and then 1, not the nearer 1 + 2^-7."""
    random = np.random.default_rng(3)
    ties = 1 + (2 * np.arange(64) + 1) * 2.0**-8
    values = np.concatenate(
        [ties, ties + 2.0**-40, ties - 2.0**-40, random.normal(size=500) * 2.0 ** random.integers(-125, 120, 500)]
    )
    values = np.concatenate([values, -values])
    rounded = from_bf16(to_bf16(values))
    assert rounded[64] == 1 + 2.0**-7
    bits = to_bf16(values)
    for value, ours, code in zip(values, rounded, bits, strict=True):
        distance = abs(Fraction(float(ours)) - Fraction(float(value)))
        for neighbour in (code - 1, code + 1):
            other = abs(Fraction(float(from_bf16(np.array([neighbour], np.uint16))[0])) - Fraction(float(value)))
            assert distance < other or (distance == other and code % 2 == 0)
    special = to_bf16(np.array([np.inf, -np.inf, 1e300, np.nan, 0.0, -0.0]))
    assert [hex(code) for code in special] == ["0x7f80", "0xff80", "0x7f80", "0x7fc0", "0x0", "0x8000"]


def test_the_scale_is_of_the_adapters_own_configuration(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = make_checkpoint()
    halved = make_adapter(base, config={"lora_alpha": 4})
    doubled = make_adapter(base)

    def half(named: dict[str, torch.Tensor]) -> None:
        named.update({name: tensor * 2 for name, tensor in named.items() if "lora_B" in name})

    same = make_adapter(base, config={"lora_alpha": 4}, edit=half)
    assert json.loads((doubled / "adapter_config.json").read_text())["lora_alpha"] == 8
    assert merge(base, doubled, tmp_path / "a") == merge(base, same, tmp_path / "b")
    assert merge(base, halved, tmp_path / "c") != merge(base, same, tmp_path / "d")

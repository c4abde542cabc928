"""A LoRA adapter in PEFT's format, merged into a base checkpoint.

W + (alpha / r) B A is the definition of Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from math import frexp, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from redraft.engine.checkpoints.bf16 import from_bf16, to_bf16
from redraft.engine.checkpoints.checkpoint import (
    Positive,
    PositiveReal,
    expected_shapes,
    open_tensors,
    read_json,
    validate,
)
from redraft.engine.checkpoints.errors import AdapterError
from redraft.engine.checkpoints.identity import identity
from redraft.engine.checkpoints.models import MANIFEST
from redraft.engine.checkpoints.safetensors_file import TensorEntry, read_header, write_bf16
from redraft.engine.checkpoints.transfer import Progress, silent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 16

_LINEAR = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj)\.weight")
_NOT_COPIED = (MANIFEST, "model.safetensors.index.json")
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""What makes an adapter nothing but W + scale B A on whole layers."""


class _Config(Struct):
    r: Positive
    lora_alpha: PositiveReal
    target_modules: list[str]


def merge(base: Path, adapter: Path, out: Path, *, progress: Progress = silent) -> str:
    """Write ``base`` with ``adapter`` added to its weights into the folder ``out`` and return its identity.

    The same bits on every machine: the adapter is bf16, whose products double precision holds exactly; they are summed
    in order of rank, added to the weight, and rounded to bf16 once. Tokenizer, template and configuration are the
    base's. Raises ``AdapterError`` for an adapter that is not of this base or not of this kind.
    """
    shapes = expected_shapes(validate(base))
    scale, pairs = _open(adapter, shapes)
    sources = open_tensors(base)
    total = 2 * sum(prod(shape) for shape in shapes.values())
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.json", "*.jinja", "*.txt"):
        for file in base.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, out / file.name)

    def tensors() -> Iterator[memoryview]:
        for name in shapes:
            weight = _bf16(sources[name])
            yield (_merged(weight, pairs[name], scale) if name in pairs else weight).data.cast("B")

    write_bf16(out / "model.safetensors", shapes, tensors(), lambda done: progress("merging the adapter", done, total))
    return identity(out)


def _merged(
    weight: NDArray[np.uint16], pair: tuple[NDArray[np.float64], NDArray[np.float64]], scale: float
) -> NDArray[np.uint16]:
    import numpy as np

    a, b = pair
    update = np.zeros(weight.shape, np.float64)
    for row, column in zip(a, b.T, strict=True):  # not a matrix product: those sum in an order of their own
        update += np.multiply.outer(column, row)
    return to_bf16(from_bf16(weight).astype(np.float64) + scale * update)


def _open(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[float, dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]:
    """The scale, and for each weight that changes its A (rank, in) and B (out, rank)."""
    config = _read_config(folder)
    file = folder / WEIGHTS
    if not file.exists():
        pickled = next(
            (f"; {found.name} is a pickle, which can run code when loaded" for found in folder.glob("*.bin")), ""
        )
        raise AdapterError(f"{folder} has no {WEIGHTS}{pickled}.")
    linear = {name: match[1] for name in shapes if (match := _LINEAR.fullmatch(name))}
    unknown = sorted(set(config.target_modules) - set(linear.values()))
    if unknown or not config.target_modules:
        raise AdapterError(
            f"{folder / CONFIG}: target_modules {unknown} are not linear layers of this base; "
            f"those are {', '.join(sorted(set(linear.values())))}."
        )
    entries = read_header(file)
    pairs = {}
    for name, module in linear.items():
        if module in config.target_modules:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = shapes[name]
            a = _take(file, entries, f"{stem}.lora_A.weight", (config.r, columns))
            pairs[name] = a, _take(file, entries, f"{stem}.lora_B.weight", (rows, config.r))
    if entries:
        raise AdapterError(f"{file}: tensor {min(entries)} belongs to none of the target modules of {CONFIG}.")
    return config.lora_alpha / config.r, pairs


def _read_config(folder: Path) -> _Config:
    file = folder / CONFIG
    content = read_json(file)
    for name, only in _PLAIN.items():
        if (value := content.get(name, only)) != only and (value or only):
            raise AdapterError(f"{file}: {name} {value!r} is not supported, only {only!r}.")
    try:
        config = msgspec.convert(content, _Config)
    except msgspec.ValidationError as error:
        raise AdapterError(f"{file} is not as it should be: {error}.") from error
    if config.r > MAX_RANK or frexp(config.lora_alpha / config.r)[0] != 0.5:
        raise AdapterError(
            f"{file}: r {config.r} and lora_alpha {config.lora_alpha:g} are not supported: "
            f"r must be at most {MAX_RANK} and lora_alpha / r a power of two."
        )
    return config


def _take(file: Path, entries: dict[str, TensorEntry], name: str, shape: tuple[int, int]) -> NDArray[np.float64]:
    import numpy as np

    entry = entries.pop(name, None)
    if entry is None:
        raise AdapterError(f"{file} lacks tensor {name}, which its {CONFIG} and this base call for.")
    if entry.shape != shape or entry.dtype != "BF16":
        raise AdapterError(
            f"{file}: tensor {name} is {entry.dtype} of shape {list(entry.shape)}; "
            f"this base calls for BF16 {list(shape)}."
        )
    return from_bf16(_bf16(entry)).astype(np.float64)


def _bf16(entry: TensorEntry) -> NDArray[np.uint16]:
    import numpy as np

    kinds: dict[str, Any] = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
    stored = np.fromfile(entry.file, kinds[entry.dtype], prod(entry.shape), offset=entry.start).reshape(entry.shape)
    return stored if entry.dtype == "BF16" else to_bf16(stored.astype(np.float32))

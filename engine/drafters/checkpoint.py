"""Reading and writing drafter weights: safetensors only, every name and shape accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import open_tensors
from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.checkpoints.safetensors_file import DTYPE_BYTES, TensorEntry

SHARD_BYTES = 15 << 20
"""Largest file of weights."""


class DrafterError(CheckpointError):
    """A drafter checkpoint that is damaged, unsupported, or made for another target."""


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """Where a folder's tensors are, which must be exactly those of ``shapes``; raises `DrafterError`."""
    entries = open_tensors(folder)
    for name, shape in shapes.items():
        if name not in entries:
            raise DrafterError(f"{folder} lacks tensor {name}, which its config.json calls for.")
        if entries[name].shape != shape:
            raise DrafterError(
                f"{entries[name].file}: tensor {name} has shape {list(entries[name].shape)}; "
                f"config.json calls for {list(shape)}."
            )
        if entries[name].dtype not in DTYPE_BYTES:
            raise DrafterError(
                f"{entries[name].file}: tensor {name} is of type {entries[name].dtype}; "
                f"supported are {', '.join(DTYPE_BYTES)}."
            )
    unexpected = sorted(entries.keys() - shapes.keys())
    if unexpected:
        raise DrafterError(f"{entries[unexpected[0]].file}: tensor {unexpected[0]} is not part of such a drafter.")
    return entries


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a folder, which must be exactly those of ``shapes``; raises `DrafterError`."""
    entries = check_tensors(folder, shapes)
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

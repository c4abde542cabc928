"""The safetensors format on disk: eight bytes of header length, a JSON header, then the tensors' bytes.

Reading goes through the header alone, so that a check of a large checkpoint costs nothing; writing streams, so that
one tensor is in memory at a time. (``safetensors.numpy`` knows no bf16, and ``serialize_file`` has changed its
arguments between releases.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from redraft.engine.checkpoints.errors import CheckpointError

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``start`` and ``stop`` are byte offsets in ``file``; ``dtype`` is safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Entry(Struct):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[int, int]


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read where a file's tensors lie, and prove that all their bytes are there."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            data_start = 8 + int.from_bytes(stream.read(8), "little")
            if data_start > min(size, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} is truncated or no safetensors file: its header is not complete.")
            header = msgspec.json.decode(stream.read(data_start - 8), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        described = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is corrupt: its safetensors header cannot be understood ({error}).") from error
    entries: dict[str, TensorEntry] = {}
    end = data_start
    for name, entry in sorted(described.items(), key=lambda item: item[1].data_offsets):
        start, stop = (data_start + offset for offset in entry.data_offsets)
        width = DTYPE_BYTES.get(entry.dtype)
        if start != end or stop < start:
            raise CheckpointError(f"{file} is corrupt: tensor {name} does not begin where the one before it ends.")
        if width is not None and stop - start != width * prod(entry.shape):
            raise CheckpointError(
                f"{file} is corrupt: tensor {name} of shape {entry.shape} and type {entry.dtype} "
                f"should take {width * prod(entry.shape)} bytes, not {stop - start}."
            )
        entries[name] = TensorEntry(file, entry.dtype, tuple(entry.shape), start, stop)
        end = stop
    if end != size:
        state = "truncated" if end > size else "corrupt"
        raise CheckpointError(f"{file} is {state}: its tensors end at byte {end}, the file at {size}. Fetch it again.")
    return entries


def write_bf16(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[bytes | memoryview],
    written: Callable[[int], None],
) -> None:
    """Write bf16 tensors, given in the order of ``shapes``, and sync them to disk; ``written`` is told bytes done."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            done += stream.write(tensor)
            written(done)
        if done != offset:
            raise AssertionError(f"{file}: wrote {done} bytes of tensors, the header says {offset}")
        stream.flush()
        os.fsync(stream.fileno())

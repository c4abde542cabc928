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
from typing import Any

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


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read where a file's tensors lie, and prove that all their bytes are there."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_length = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} is truncated or no safetensors file: its header is not complete.")
            header: Any = json.loads(stream.read(header_length))
        data_start = 8 + header_length
        entries = {
            name: TensorEntry(
                file,
                entry["dtype"],
                tuple(entry["shape"]),
                data_start + entry["data_offsets"][0],
                data_start + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} is corrupt: its safetensors header cannot be understood.") from error
    for name, entry in entries.items():
        if entry.stop > size:
            raise CheckpointError(f"{file} is truncated: tensor {name} ends at byte {entry.stop}, the file at {size}.")
        width = DTYPE_BYTES.get(entry.dtype)
        if width is not None and entry.stop - entry.start != width * prod(entry.shape):
            raise CheckpointError(
                f"{file} is corrupt: tensor {name} of shape {list(entry.shape)} and type {entry.dtype} "
                f"should take {width * prod(entry.shape)} bytes, not {entry.stop - entry.start}."
            )
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

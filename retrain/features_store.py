"""Where captured features are kept: a cache that may lose anything at any time; what is missing is captured again."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from redraft.engine.types import FeatureRef

GENERATION = 1
"""Grows when the same reference comes to mean other numbers: what is older is never read."""

LOCAL_BYTES = 2 << 30

ROWS, CHECKSUM = "rows", "crc32"
"""A file's one tensor, and the checksum in its header."""


class FeatureStore(Protocol):
    """Rows [rows, size] of hidden states by reference, which says which rows, of which layers, and whose.

    What a reference to another ``store`` or ``generation`` names is never found.
    """

    @property
    def name(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def bytes(self) -> int:
        """What is kept now."""
        ...

    @property
    def refs(self) -> int:
        """How many references are kept now; bytes over refs are what one costs."""
        ...

    def __contains__(self, ref: FeatureRef) -> bool: ...

    def put(self, ref: FeatureRef, rows: Tensor) -> None:
        """Keep rows, if there is room; a reference that is kept already is replaced."""
        ...

    def get(self, ref: FeatureRef) -> Tensor | None:
        """None if they were never kept, were dropped, or are damaged."""
        ...

    def clear(self) -> None:
        """Drop all that is kept, whoever put it there."""
        ...


class MemoryStore:
    """On the device that captured, up to ``budget`` bytes: first come, first kept, so that epochs do not thrash it."""

    name = "memory"
    generation = GENERATION

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: dict[FeatureRef, Tensor] = {}
        self.bytes = 0

    @property
    def refs(self) -> int:
        return len(self._kept)

    def __contains__(self, ref: FeatureRef) -> bool:
        return ref in self._kept

    def put(self, ref: FeatureRef, rows: Tensor) -> None:
        old = self._kept.get(ref)
        grown = rows.nbytes - (0 if old is None else old.nbytes)
        if self.bytes + grown <= self._budget:
            self._kept[ref] = rows.clone()
            self.bytes += grown

    def get(self, ref: FeatureRef) -> Tensor | None:
        return self._kept.get(ref)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0


class LocalStore:
    """Memory-mapped files in ``folder``, up to ``budget`` bytes: the oldest make room. Writes are whole or not at all.

    A file that is damaged or of another generation counts as missing; a full disk keeps nothing and stops nobody. Only
    its user may read the folder, for features tell their tokens.
    """

    name = "local"
    generation = GENERATION

    def __init__(self, folder: Path, budget: int = LOCAL_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._folder = folder
        self._budget = budget
        found = sorted(
            ((entry.stat().st_mtime_ns, entry.name, entry.stat().st_size) for entry in os.scandir(folder)),
        )
        self._sizes: dict[str, int] = {}
        for _, name, size in found:
            if name.endswith(".partial"):
                (folder / name).unlink(missing_ok=True)
            elif name.endswith(".safetensors"):
                self._sizes[name] = size
        self.bytes = sum(self._sizes.values())
        self._make_room(0)

    @property
    def refs(self) -> int:
        return len(self._sizes)

    def __contains__(self, ref: FeatureRef) -> bool:
        return _file_name(ref) in self._sizes

    def put(self, ref: FeatureRef, rows: Tensor) -> None:
        name = _file_name(ref)
        self._drop(name)
        file, partial = self._folder / name, self._folder / f"{name}.partial"
        rows = rows.cpu().contiguous()
        try:
            save_file({ROWS: rows}, partial, {CHECKSUM: _checksum(rows)})
            size = partial.stat().st_size
            if size > self._budget:
                partial.unlink()
                return
            self._make_room(size)
            partial.replace(file)
        except (OSError, SafetensorError):
            partial.unlink(missing_ok=True)
            return
        self._sizes[name] = size
        self.bytes += size

    def get(self, ref: FeatureRef) -> Tensor | None:
        name = _file_name(ref)
        if name not in self._sizes:
            return None
        try:
            with safe_open(self._folder / name, framework="pt") as file:
                rows: Tensor = file.get_tensor(ROWS)
                if _checksum(rows) == file.metadata()[CHECKSUM]:
                    return rows
        except (OSError, SafetensorError, LookupError, TypeError):
            pass
        self._drop(name)
        return None

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)
        self._sizes.clear()
        self.bytes = 0

    def _make_room(self, wanted: int) -> None:
        while self._sizes and self.bytes + wanted > self._budget:
            self._drop(next(iter(self._sizes)))

    def _drop(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)
        (self._folder / name).unlink(missing_ok=True)


def _file_name(ref: FeatureRef) -> str:
    return hashlib.blake2b(msgspec.json.encode(ref), digest_size=16).hexdigest() + ".safetensors"


def _checksum(rows: Tensor) -> str:
    return str(zlib.crc32(rows.view(torch.uint8).numpy().data))

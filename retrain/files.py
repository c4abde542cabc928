"""Files that are there whole or not at all, whenever a process or the machine stops."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold ``file`` alone, waiting for it; the kernel lets go of it however its holder ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def replace(file: Path, content: bytes) -> None:
    """Put ``content`` in the place of ``file``, on disk before this returns; a reader sees the old or the new.

    The caller holds a lock: there is one such file on its way at a time.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    with new.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

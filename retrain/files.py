"""Files that are there whole or not at all, whenever a process or the machine stops."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold ``file`` alone, waiting for it; the kernel lets go of it however its holder ends."""
    private_folder(file.parent)
    with open(file, "ab", opener=_private) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def private_folder(folder: Path) -> None:
    """Make a folder, and what is missing above it, for its owner alone; one that is there stays as it is."""
    if not folder.is_dir():
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def replace(file: Path, content: bytes) -> None:
    """Put ``content`` in the place of ``file``, on disk before this returns; a reader sees the old or the new.

    It is its owner's alone. The caller holds a lock: there is one such file on its way at a time.
    """
    private_folder(file.parent)
    new = file.with_name(f".{file.name}.new")
    try:
        with open(new, "wb", opener=_private) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from error
    sync(file.parent)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

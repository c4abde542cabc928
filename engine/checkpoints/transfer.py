"""What every way of fetching a model shares: telling how far it is, and minding the disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from redraft.engine.checkpoints.errors import PullError

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are done (0 of 0 where that is not known)."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


def bytes_under(folder: Path) -> int:
    """Size in bytes of all files in a folder that somebody else may be writing to."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.lstat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def check_space(folder: Path, needed: int, remedy: str) -> None:
    """Refuse to begin what would not fit; ``needed`` in bytes."""
    if _free(folder) < needed:
        raise no_space(folder, needed, remedy)


def is_no_space(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space(folder: Path, needed: int, remedy: str) -> PullError:
    return PullError(
        f"Not enough disk space: {folder} has {_free(folder) / 1e6:.0f} MB free and the pull needs "
        f"{needed / 1e6:.0f} MB. Free some space there, or {remedy}."
    )


def _free(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free

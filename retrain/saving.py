"""What torch and safetensors write, without leftovers and with a name where the disk is full."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def written(path: Path) -> Iterator[None]:
    """While the file or folder ``path`` is written: if that fails, take it away and raise `OSError` with its name."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise OSError(errno.EIO, "it cannot be written; is the disk full?", str(path)) from error

"""AdamW, without the folder that torch leaves behind when one is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def adamw(parameters: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """``torch.optim.AdamW`` of ``parameters`` with ``options``.

    torch's optimizers import its compiler, which makes a folder for its cache, ``torchinductor_<user>`` among temporary
    files, where none is named; nothing is compiled here, so that it is named one that ends with the import.
    """
    if _CACHE not in os.environ and "torch._dynamo" not in sys.modules:
        with TemporaryDirectory(prefix="redraft-") as folder:
            os.environ[_CACHE] = folder
            import_module("torch._dynamo")
            del os.environ[_CACHE]
    return torch.optim.AdamW(parameters, **options)

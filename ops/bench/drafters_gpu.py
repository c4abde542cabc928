"""`redraft bench drafters-gpu`: the same comparison of drafters, on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redraft.ops.bench.drafters import compare


def run(*, quick: bool = False, drafters: Path | None = None) -> dict[str, Any]:
    """Like `redraft.ops.bench.drafters.run`."""
    return compare("drafters-gpu", quick=quick, drafters=drafters, device="cuda")

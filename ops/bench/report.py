"""The envelope every benchmark's result comes in, and the statistics they share."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def envelope(
    name: str, method: str, commit: str | None, metrics: Mapping[str, float | None], table: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A result; ``commit`` is what `present_commit` said before the measuring began."""
    return {
        "name": name,
        "commit": commit,
        "machine": _machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": method,
        "metrics": {key: None if value is None else round(value, 4) for key, value in metrics.items()},
        "table": list(table),
    }


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly over all.

    >>> spread(range(19), 4), spread("ab", 5)
    ([0, 4, 9, 14], ['a', 'b'])
    """
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    fields = dict(
        line.split(":", 1) for line in (cpuinfo.read_text() if cpuinfo.exists() else "").splitlines() if ":" in line
    )
    flags = next((value.split() for key, value in fields.items() if key.strip() == "flags"), [])
    model = next((value.strip() for key, value in fields.items() if key.strip() == "model name"), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "bf16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        **_gpu(),
    }


def _gpu() -> dict[str, str]:
    """The GPU, where a benchmark has loaded torch and there is one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch and torch.cuda.is_available() else {}

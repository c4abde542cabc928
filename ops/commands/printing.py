"""How commands print for people: tables and sentences, and times."""

from __future__ import annotations

from datetime import datetime

from rich.console import Console

UNBOUNDED = 1 << 16
"""Columns of what is no terminal, where nothing is wrapped."""


def console(*, stderr: bool = False, least: int = 0) -> Console:
    """Wraps tables where a terminal ends, though not before ``least`` columns, and nowhere else."""
    found = Console(stderr=stderr, highlight=False, soft_wrap=True)
    found.width = max(found.width, least) if found.is_terminal else UNBOUNDED
    return found


def moment(seconds: float) -> str:
    """Seconds since 1970 as local time with its zone: 2026-11-30 18:00:05+01:00."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")

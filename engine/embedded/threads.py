"""How many threads a pass may use while other programs want the same cores.

A pass is hundreds of short parallel regions, and each ends only when its slowest thread does. One busy neighbour on one
core makes every region wait for the scheduler, many times as long as the region itself, so the engine leaves that core
to it. Niced work does not count: it gives way by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path, PurePosixPath

import torch

WINDOW_SECONDS = 0.5
GIVE_UP = 0.4
TAKE_BACK = 0.2
"""Cores that others keep busy, beyond whole ones, at which a thread is given up and taken back."""

STALE_SECONDS = 60.0
"""Without a pass for this long, what others did since the last one says nothing of now; a starved pass takes many."""

_STAT = Path("/proc/stat")
_TICK = os.sysconf("SC_CLK_TCK")


def threads_for(others: float, current: int, limit: int) -> int:
    """Threads to use, of at most ``limit``, when others keep ``others`` cores busy.

    >>> [threads_for(others, 2, 2) for others in (0.1, 0.3, 0.9, 3.0)]
    [2, 2, 1, 1]
    >>> [threads_for(others, 1, 2) for others in (0.1, 0.3)]
    [2, 1]
    """
    fewer = max(1, limit - math.ceil(max(0.0, others - GIVE_UP)))
    more = max(1, limit - math.ceil(max(0.0, others - TAKE_BACK)))
    return fewer if fewer < current else max(current, more)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may keep busy: its CPU set, within the quotas of its control groups (version 2 or 1)."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    # A container may see its own group as the root, whatever its name is outside.
    names = {PurePosixPath(name.lstrip("/")) for _, kind, name in groups if not kind or "cpu" in kind.split(",")}
    inside = {PurePosixPath(), *names, *(parent for name in names for parent in name.parents)}
    tops = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/cpu")
    return max(1, int(min(len(os.sched_getaffinity(0)), *(_quota(top / folder) for top in tops for folder in inside))))


def _quota(group: Path) -> float:
    """Cores' worth of time that a control group may use; infinite where it has no limit."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (float(word) for name in names for word in (group / name).read_text().split())
            if quota > 0:
                return quota / period
    return math.inf


class ThreadGovernor:
    """Sets torch's threads from what other programs did on this process's cores in the last half second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._started = (0.0, 0.0, 0.0)
        self.threads = limit
        torch.set_num_threads(limit)

    def update(self) -> None:
        """Call once a pass, on the thread that computes."""
        now = time.monotonic()
        elapsed = now - self._started[0]
        if elapsed < WINDOW_SECONDS:
            return
        busy, own = self._busy_seconds(), time.process_time()
        others = (busy - self._started[1] - (own - self._started[2])) / elapsed
        known = self._started[0] > 0 and elapsed < STALE_SECONDS
        self._started = (now, busy, own)
        threads = threads_for(others, self.threads, self._limit) if known else self.threads
        if threads != self.threads:
            self.threads = threads
            torch.set_num_threads(threads)

    def _busy_seconds(self) -> float:
        """Seconds that this process's cores have spent on programs that are not niced, and on interrupts."""
        try:
            lines = _STAT.read_text().splitlines()
        except OSError:
            return 0.0
        ticks = 0
        for line in lines:
            core, *fields = line.split()
            if core in self._cores:
                user, _nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
                ticks += user + system + irq + softirq
        return ticks / _TICK

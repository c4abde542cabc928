"""Facts about processes that a bare pid does not give, read from Linux's /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from msgspec import Struct

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessId(Struct, frozen=True):
    """A pid together with its start time in clock ticks since boot, so that a recycled pid is not mistaken for it."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Signal the process, unless it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Signal the group that the process leads or led: the kernel reuses no pid that still names a group."""
        if _start_time(self.pid) in (self.started, None):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process; None if there is none."""
    started = _start_time(pid)
    return None if started is None else ProcessId(pid, started)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, however it ends. For use between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def describe_exit(returncode: int) -> str:
    """An exit status in words."""
    if returncode >= 0:
        return f"exit status {returncode}"
    if -returncode == signal.SIGKILL:
        return "killed (SIGKILL); if nobody did, the machine ran out of memory"
    return f"killed by {signal.Signals(-returncode).name}"


def _start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])

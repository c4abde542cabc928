"""How training stays out of serving's way on the same machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from redraft.engine.embedded.threads import usable_cores
from redraft.retrain.errors import Stopped

LEAST_DUTY = 0.1
"""The share of its time that training works at least, however busy serving is."""

POLL_S = 0.1


def be_background() -> None:
    """Give this whole process the lowest priority there is; to be called before torch computes anything.

    Where the kernel knows an idle class, training gets CPU time only where nobody else wants any. It takes all cores
    then, so that a pass is over the sooner.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(usable_cores())


class Duty:
    """Called between passes: waits while serving is busy, and raises `Stopped` once ``stop`` is set.

    It never waits longer than nine times what the pass before took, so that training is done some day: it works at
    least a tenth of the time it is allowed CPU.
    """

    def __init__(
        self, busy: Callable[[], bool], stop: threading.Event, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._busy = busy
        self._stop = stop
        self._clock = clock
        self._resumed = clock()

    def __call__(self) -> None:
        began = self._clock()
        until = began + (began - self._resumed) * (1 / LEAST_DUTY - 1)
        while not self._stop.is_set() and self._clock() < until and self._busy():
            self._stop.wait(POLL_S)
        if self._stop.is_set():
            raise Stopped("training was asked to stop; what it had is saved, and the same command goes on from there")
        self._resumed = self._clock()


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of what they did before; only in a process's main thread."""
    stop = threading.Event()
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

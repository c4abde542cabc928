from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest

from redraft.retrain.background import POLL_S, Duty, stopped_by_signals
from redraft.retrain.errors import Stopped

pytestmark = pytest.mark.unit


@dataclass
class Machine:
    """A clock that only waiting and working move, and a server that is busy until some time."""

    busy_until: float = 0.0
    now: float = 0.0
    waited: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    stop_at: float = float("inf")

    def duty(self) -> Duty:
        self.stop.wait = self.wait  # type: ignore[method-assign]
        return Duty(lambda: self.now < self.busy_until, self.stop, clock=lambda: self.now)

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0
        self.waited += timeout or 0
        if self.now >= self.stop_at:
            self.stop.set()
        return self.stop.is_set()


def test_training_waits_while_serving_is_busy_and_no_longer() -> None:
    machine = Machine(busy_until=3.0)
    duty = machine.duty()
    machine.now += 1.0
    duty()
    assert 3.0 <= machine.now <= 3.0 + POLL_S + 1e-9
    machine.now += 1.0
    before = machine.now
    duty()
    assert machine.now == before


def test_training_beside_a_server_that_is_always_busy_works_a_tenth_of_the_time() -> None:
    machine = Machine(busy_until=float("inf"))
    duty = machine.duty()
    worked = 0.0
    for took in (0.5, 2.0, 0.1, 1.0) * 10:
        machine.now += took
        worked += took
        duty()
    assert worked / machine.now == pytest.approx(0.1, abs=0.01)


def test_a_run_that_waits_or_works_stops_when_asked() -> None:
    waiting = Machine(busy_until=float("inf"), stop_at=2.0)
    duty = waiting.duty()
    waiting.now = 1.0
    with pytest.raises(Stopped, match="asked to stop"):
        duty()
    assert waiting.now <= 2.0 + POLL_S
    working = Machine()
    duty = working.duty()
    working.stop.set()
    with pytest.raises(Stopped):
        duty()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_its_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stopped_by_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
    assert signal.getsignal(number) is before


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def work() -> None:
        with stopped_by_signals() as stop:
            found.append((stop.is_set(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, before)]


def test_a_background_process_has_the_lowest_priority() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import os, torch; from redraft.engine.embedded.threads import usable_cores;"
            "from redraft.retrain.background import be_background; be_background();"
            "print(os.nice(0), getattr(os, 'sched_getscheduler', lambda _: None)(0) == getattr(os, 'SCHED_IDLE', None),"
            "torch.get_num_threads() == usable_cores())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["19", "True", "True"]

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redraft.engine.embedded import threads
from redraft.engine.embedded.threads import ThreadGovernor, threads_for, usable_cores

pytestmark = pytest.mark.unit


@given(st.floats(0, 64), st.integers(1, 16), st.integers(1, 16))
def test_threads_stay_between_one_and_the_limit_and_settle_at_once(others: float, current: int, limit: int) -> None:
    current = min(current, limit)
    chosen = threads_for(others, current, limit)
    assert 1 <= chosen <= limit
    assert threads_for(others, chosen, limit) == chosen
    assert chosen == limit if others < threads.TAKE_BACK else chosen >= 1
    assert chosen <= max(1, limit - 1) if others > threads.GIVE_UP else chosen == current or chosen > current


def test_a_busy_neighbour_takes_a_thread_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 1000.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(threads.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(ThreadGovernor, "_busy_seconds", lambda self: clock["busy"])
    before = torch.get_num_threads()
    try:
        governor = ThreadGovernor(2)
        governor.update()
        for others, expected in ((0.0, 2), (1.0, 1), (0.3, 1), (0.0, 2), (0.3, 2)):
            clock["now"] += 1
            clock["own"] += 2
            clock["busy"] += 2 + others
            governor.update()
            assert governor.threads == torch.get_num_threads() == expected
        for elapsed, expected in ((threads.STALE_SECONDS, 2), (threads.STALE_SECONDS / 2, 1)):
            clock["now"] += elapsed
            clock["busy"] += elapsed
            governor.update()
            assert governor.threads == expected, "a starved pass is long, and what stood idle for longer is not known"
    finally:
        torch.set_num_threads(before)


def test_a_machine_without_proc_keeps_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_STAT", threads.Path("/nonexistent/stat"))
    governor = ThreadGovernor(torch.get_num_threads())
    monkeypatch.setattr(threads, "WINDOW_SECONDS", 0.0)
    governor.update()
    governor.update()
    assert governor.threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/outside/name\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/other/cpu.max": "100000 100000\n"}, 16),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_threads_by_default_are_the_cores_within_every_quota(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(16)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores

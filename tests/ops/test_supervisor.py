"""A deployment's processes start, fail, come back and end together."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from redraft.ops.config import load_config
from redraft.ops.deployment import Deployment, State
from redraft.ops.errors import CliError
from redraft.ops.processes import ProcessId, identify
from redraft.ops.supervisor import Service, Supervisor, Timing

pytestmark = pytest.mark.unit

IDLE = "import signal; print('idle', flush=True); signal.pause()"
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("idle", flush=True)
while True:
    signal.pause()
"""
TIMING = Timing(probe=0.01, watch=0.01, start_limit=20, first_delay=0.01, longest_delay=0.02)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def first_state() -> State:
    me = identify(os.getpid())
    assert me
    return State(supervisor=me, phase="starting", url="http://127.0.0.1:1", config="")


class Run:
    """A supervisor under test; ``until`` waits for a state that it reports."""

    def __init__(
        self,
        folder: Path,
        *services: Service,
        probe: Callable[[Run], bool] = lambda run: run.said("idle"),
        timing: Timing = TIMING,
    ) -> None:
        self.deployment = Deployment(folder)
        self.services = services
        self.states: list[State] = []
        self.supervisor = Supervisor(services, self.deployment, first_state(), self._probe(probe), self._report, timing)
        self._news = asyncio.Event()

    def _probe(self, probe: Callable[[Run], bool]) -> Callable[[], Awaitable[str | None]]:
        async def ask() -> str | None:
            return None if probe(self) else self.services[0].name

        return ask

    def _report(self, state: State) -> None:
        self.states.append(state)
        self._news.set()

    def said(self, word: str) -> bool:
        logs = [self.deployment.log(service.name) for service in self.services]
        return all(log.exists() and word in log.read_text() for log in logs)

    async def until(self, wanted: Callable[[State], bool]) -> State:
        seen = 0
        async with asyncio.timeout(20):
            while True:
                for state in self.states[seen:]:
                    seen += 1
                    if wanted(state):
                        return state
                self._news.clear()
                if seen == len(self.states):
                    await self._news.wait()


def ready(state: State) -> bool:
    return state.phase == "ready"


def pid_of(state: State, service: str) -> int:
    process = state.services[service].process
    assert process
    return process.pid


def wait_gone(descriptor: int) -> None:
    """Wait for a process, opened with ``pidfd_open``, to end."""
    assert select.select([descriptor], [], [], 20)[0], "the process is still there"


async def test_a_killed_engine_comes_back_while_the_gateway_stays(tmp_path: Path) -> None:
    run = Run(tmp_path, Service("engine", python(IDLE), grace=5), Service("gateway", python(IDLE), grace=5))
    running = asyncio.create_task(run.supervisor.run())
    before = await run.until(ready)
    os.kill(pid_of(before, "engine"), signal.SIGKILL)
    degraded = await run.until(lambda s: s.phase == "degraded")
    after = await run.until(lambda s: s.phase == "ready" and s.services["engine"].restarts == 1)
    assert degraded.message.startswith("engine: killed (SIGKILL)")
    assert pid_of(after, "engine") != pid_of(before, "engine")
    assert pid_of(after, "gateway") == pid_of(before, "gateway")
    run.supervisor.stop()
    await running
    assert run.deployment.read() == run.states[-1]
    assert run.states[-1].phase == "stopped"


async def test_a_service_that_dies_at_the_start_ends_it_with_its_own_words(tmp_path: Path) -> None:
    dying = "import sys; sys.exit('error: model x is not here; fetch it')"

    run = Run(tmp_path, Service("engine", python(dying), grace=5), Service("gateway", python(IDLE), grace=5))
    with pytest.raises(CliError, match=r"engine: model x is not here; fetch it\n.*engine\.log"):
        await run.supervisor.run()
    assert run.states[-1].phase == "failed"
    assert "model x is not here" in run.states[-1].message
    gateway = run.states[-1].services["gateway"].process
    assert gateway is None or not gateway.alive


async def test_words_of_an_earlier_run_are_not_blamed_on_this_one(tmp_path: Path) -> None:
    Deployment(tmp_path).log("engine").write_text("error: an old story\n")

    run = Run(tmp_path, Service("engine", python("import os; os._exit(3)"), grace=5))
    with pytest.raises(CliError, match="engine: exit status 3"):
        await run.supervisor.run()


async def test_a_start_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    timing = Timing(probe=0.01, start_limit=0.05)
    run = Run(tmp_path, Service("engine", python(IDLE), grace=5), probe=lambda run: False, timing=timing)
    with pytest.raises(CliError, match=r"not ready within 0\.05 s"):
        await run.supervisor.run()
    engine = run.states[-1].services["engine"].process
    assert engine is None or not engine.alive


async def test_delays_between_restarts_grow_to_a_limit(tmp_path: Path) -> None:
    # Dies whenever its flag is there, which is from the moment the deployment was ready.
    flag = tmp_path / "die"
    code = f"import os, time\nprint('idle', flush=True)\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    run = Run(tmp_path, Service("engine", python(code), grace=5))
    running = asyncio.create_task(run.supervisor.run())
    await run.until(ready)
    flag.touch()
    await run.until(lambda s: s.services["engine"].restarts == 4)
    details = dict.fromkeys(s.services["engine"].detail for s in run.states if s.phase == "degraded")
    waits = [d.rpartition("again in ")[2] for d in details if "again in" in d]
    assert waits == ["0.01 s", "0.02 s"]
    run.supervisor.stop()
    await running


async def test_a_frozen_service_is_told_and_then_killed_and_started_again(tmp_path: Path) -> None:
    frozen: set[ProcessId] = set()

    def answers(run: Run) -> bool:
        return run.states[-1].services["engine"].process not in frozen

    timing = dataclasses.replace(TIMING, silence_limit=0.2)
    run = Run(
        tmp_path,
        Service("engine", python(IDLE), grace=5),
        Service("gateway", python(IDLE), grace=5),
        probe=answers,
        timing=timing,
    )
    running = asyncio.create_task(run.supervisor.run())
    before = await run.until(ready)
    engine = before.services["engine"].process
    assert engine
    descriptor = os.pidfd_open(engine.pid)
    signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
    frozen.add(engine)
    told = await run.until(lambda s: s.phase == "degraded")
    killed = await run.until(lambda s: s.phase == "degraded" and s.services["engine"].restarts == 1)
    after = await run.until(lambda s: ready(s) and s.services["engine"].restarts == 1)
    assert told.message == "engine: does not answer; after 0.2 s it is started again"
    assert told.services["engine"].process == engine
    assert killed.message == "engine: did not answer for 0.2 s and was killed"
    assert pid_of(after, "gateway") == pid_of(before, "gateway")
    wait_gone(descriptor)
    os.close(descriptor)
    run.supervisor.stop()
    await running


async def test_a_service_that_is_silent_for_a_moment_stays(tmp_path: Path) -> None:
    silent = False
    run = Run(tmp_path, Service("engine", python(IDLE), grace=5), probe=lambda run: not silent)
    running = asyncio.create_task(run.supervisor.run())
    before = await run.until(ready)
    silent = True
    await run.until(lambda s: s.phase == "degraded")
    silent = False
    seen = len(run.states)
    await run.until(lambda s: s.phase == "ready" and len(run.states) > seen)
    assert run.states[-1].services == before.services
    run.supervisor.stop()
    await running


async def test_a_restart_that_fails_is_one_more_death_and_not_the_end(tmp_path: Path) -> None:
    refusals: list[Exception] = []

    def listen() -> socket.socket:
        if refusals:
            raise refusals.pop()
        return socket.create_server(("127.0.0.1", 0))

    run = Run(tmp_path, Service("gateway", python(IDLE), grace=5, listen=listen))
    running = asyncio.create_task(run.supervisor.run())
    before = await run.until(ready)
    refusals += [CliError("the port is taken"), BlockingIOError(errno.EAGAIN, "no process can be made")]
    run.deployment.log("gateway").unlink()
    os.kill(pid_of(before, "gateway"), signal.SIGKILL)
    after = await run.until(lambda s: s.phase == "ready" and s.services["gateway"].restarts == 3)
    said = dict.fromkeys(state.message for state in run.states if state.phase == "degraded")
    assert [message.partition(": ")[2] for message in said] == [
        "killed (SIGKILL); if nobody did, the machine ran out of memory",
        "could not be started: [Errno 11] no process can be made",
        "could not be started: the port is taken",
    ]
    assert pid_of(after, "gateway") != pid_of(before, "gateway")
    run.supervisor.stop()
    await running


async def test_stopping_ends_services_that_ignore_it_and_what_they_started(tmp_path: Path) -> None:
    start_child = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid)"
    run = Run(tmp_path, Service("engine", python(start_child + STUBBORN), grace=0.05))
    running = asyncio.create_task(run.supervisor.run())
    state = await run.until(ready)
    child = int(run.deployment.log("engine").read_text().replace("idle", "").split()[0])
    descriptors = [os.pidfd_open(child), os.pidfd_open(pid_of(state, "engine"))]
    run.supervisor.stop()
    await running
    for descriptor in descriptors:
        wait_gone(descriptor)
        os.close(descriptor)


def test_a_killed_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from redraft.ops.config import load_config
from redraft.ops.deployment import Deployment, State
from redraft.ops.processes import identify
from redraft.ops.supervisor import Service, Supervisor
async def probe(): return None
state = State(supervisor=identify(os.getpid()), phase="starting", url="", config="")
report = lambda s: s.phase == "ready" and print(s.services["engine"].process.pid, flush=True)
deployment = Deployment(Path({str(tmp_path)!r}))
asyncio.run(Supervisor([Service("engine", {python(STUBBORN)!r}, grace=5)], deployment, state, probe, report).run())
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout
        descriptor = os.pidfd_open(int(supervisor.stdout.readline()))
        supervisor.kill()
        wait_gone(descriptor)
        os.close(descriptor)


async def test_a_service_serves_the_socket_it_was_given_again_after_a_crash(tmp_path: Path) -> None:
    code = """
import os, socket, sys
listener = socket.socket(fileno=int(sys.argv[sys.argv.index("--listen-fd") + 1]))
while True:
    connection = listener.accept()[0]
    if connection.recv(9) == b"die":
        os._exit(1)
    connection.sendall(b"hello")
    connection.close()
"""
    port = 0

    def listen() -> socket.socket:
        nonlocal port
        listener = socket.create_server(("127.0.0.1", port))
        port = listener.getsockname()[1]
        return listener

    def ask(word: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(word)
            return connection.recv(9)

    def answers(run: Run) -> bool:
        try:
            return ask(b"hi") == b"hello"
        except OSError:
            return False

    run = Run(tmp_path, Service("gateway", python(code), grace=5, listen=listen), probe=answers)
    running = asyncio.create_task(run.supervisor.run())
    await run.until(ready)
    assert await asyncio.to_thread(ask, b"die") == b""
    await run.until(lambda s: s.phase == "ready" and s.services["gateway"].restarts == 1)
    run.supervisor.stop()
    await running


def test_a_recycled_pid_is_never_signalled() -> None:
    with subprocess.Popen(python(IDLE), start_new_session=True, stdout=subprocess.PIPE) as bystander:
        assert bystander.stdout
        bystander.stdout.readline()
        stale = ProcessId(bystander.pid, started=1)
        stale.send(signal.SIGKILL)
        stale.send_group(signal.SIGKILL)
        assert not stale.alive
        actual = identify(bystander.pid)
        assert actual
        actual.send(signal.SIGTERM)
        assert bystander.wait(20) == -signal.SIGTERM
        assert identify(bystander.pid) is None


def test_one_holder_of_the_lock_at_a_time_and_it_goes_with_its_holder(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    lock = deployment.lock()
    assert lock is not None
    assert deployment.lock() is None
    assert deployment.is_locked()
    os.close(lock)
    assert not deployment.is_locked()


def test_a_socket_path_that_is_too_long_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"too long for a socket.*engine\.socket"):
        Deployment(tmp_path).socket(Path("/tmp") / ("é" * 52) / "e.sock")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"phase": 3}', b"\xff"])
def test_a_damaged_state_file_is_no_state(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    assert Deployment(tmp_path).read() is None


def test_two_deployments_have_two_folders(tmp_path: Path) -> None:
    def folder(port: int, name: str = "a.yaml") -> Path:
        path = tmp_path / name
        path.write_text(f"gateway: {{port: {port}}}")
        return Deployment.of(load_config(path, {})).folder

    assert folder(8000) == folder(8000, "b.yaml")
    assert len({folder(8000), folder(8001), folder(0), folder(0, "b.yaml")}) == 4


async def test_a_full_disk_does_not_stop_what_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(deployment: Deployment, state: State) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(tmp_path, Service("engine", python(IDLE), grace=5))
    running = asyncio.create_task(run.supervisor.run())
    before = await run.until(ready)
    monkeypatch.setattr(Deployment, "write", full)
    os.kill(pid_of(before, "engine"), signal.SIGKILL)
    await run.until(lambda s: s.phase == "ready" and s.services["engine"].restarts == 1)
    run.supervisor.stop()
    await running


async def test_a_full_disk_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state.json.new").mkdir()
    with pytest.raises(OSError, match=r"state\.json\.new"):
        await Run(tmp_path, Service("engine", python(IDLE), grace=5)).supervisor.run()

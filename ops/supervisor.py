"""Keeps the processes of one deployment running, and stops all of them together.

Every service is its own process group with its own log. One that dies before the deployment has been ready ends the
start with its own last words; one that dies later, or lives but does not answer, is started again, with a growing
delay, while the others go on. However the supervisor itself ends, the kernel takes its services with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from redraft.ops.deployment import Deployment, Phase, ServiceState, State
from redraft.ops.errors import CliError
from redraft.ops.processes import ProcessId, describe_exit, die_with_parent, identify

LOG_LIMIT = 16 << 20
"""Bytes after which a log is set aside when its service starts."""

LAST_WORDS = 1 << 16
"""Bytes at the end of a log that are searched for why its service died."""


@dataclass(frozen=True)
class Service:
    """A process to keep running.

    ``grace`` is the seconds between being asked to stop and being killed. ``listen`` makes the socket that the
    process serves; its descriptor is passed on as ``--listen-fd``.
    """

    name: str
    command: tuple[str, ...]
    grace: float
    listen: Callable[[], socket.socket] | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds: between probes until ready and after, for a start, for silence, and of the delays before a restart."""

    probe: float = 0.1
    watch: float = 2.0
    start_limit: float = 900.0
    silence_limit: float = 30.0
    first_delay: float = 0.5
    longest_delay: float = 30.0
    settled: float = 60.0


@dataclass(frozen=True)
class _Running:
    process: asyncio.subprocess.Process
    identity: ProcessId

    async def end(self, grace: float) -> None:
        self.identity.send_group(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), grace)
        self.identity.send_group(signal.SIGKILL)
        await self.process.wait()


class Supervisor:
    """Runs ``services``; ``probe`` names the one that does not answer; stop order is the reverse of start order."""

    def __init__(
        self,
        services: Sequence[Service],
        deployment: Deployment,
        state: State,
        probe: Callable[[], Awaitable[str | None]],
        report: Callable[[State], None] = lambda state: None,
        timing: Timing = Timing(),
    ) -> None:
        self._services = services
        self._deployment = deployment
        self._state = msgspec.structs.replace(state, services={s.name: ServiceState() for s in services})
        self._probe = probe
        self._report = report
        self._timing = timing
        self._running: dict[str, _Running] = {}
        self._given_up: dict[str, str] = {}
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._been_ready = False

    def stop(self) -> None:
        """Stop everything in an orderly way; a second call kills at once."""
        if self._stop.is_set():
            for running in self._running.values():
                running.identity.send_group(signal.SIGKILL)
        self._stop.set()

    async def run(self) -> None:
        """Return once ``stop`` was called and everything has ended.

        Raises:
            CliError: the deployment could not be started; the message holds the service's own words.
        """
        self._publish("starting")
        tasks = [asyncio.create_task(self._keep(service)) for service in self._services]
        tasks.append(asyncio.create_task(self._watch()))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            failure = next((task.exception() for task in done if task is not stopping), None)
        finally:
            stopping.cancel()
            await self._end(tasks)
        if failure is None:
            self._publish("stopped")
            return
        self._publish("failed", str(failure))
        raise failure

    async def _keep(self, service: Service) -> None:
        delay = self._timing.first_delay
        while True:
            started = time.monotonic()
            try:
                end, words = await self._run_once(service)
            except (CliError, OSError) as error:
                if not self._been_ready:
                    raise
                end = words = f"could not be started: {error}"
            message = f"{service.name}: {words}"
            if not self._been_ready:
                raise CliError(f"{message}\nThe log is {self._deployment.log(service.name)}")
            if time.monotonic() - started > self._timing.settled:
                delay = self._timing.first_delay
            restarts = self._state.services[service.name].restarts + 1
            self._update(service.name, ServiceState(restarts=restarts, detail=f"{end}; starting again in {delay:g} s"))
            self._publish("degraded", message)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._timing.longest_delay)

    async def _run_once(self, service: Service) -> tuple[str, str]:
        """Run a service to its end: how it ended, and why."""
        log = self._deployment.log(service.name)
        offset = _open_end(log)
        running = await self._start(service, log)
        returncode = await running.process.wait()
        running.identity.send_group(signal.SIGKILL)
        if given_up := self._given_up.pop(service.name, None):
            return given_up, given_up
        return describe_exit(returncode), _last_words(log, offset, returncode)

    async def _start(self, service: Service, log: Path) -> _Running:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("ab"))
            command = service.command
            descriptors: tuple[int, ...] = ()
            if service.listen:
                descriptor = stack.enter_context(service.listen()).fileno()
                command = (*command, "--listen-fd", str(descriptor))
                descriptors = (descriptor,)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "REDRAFT_DEBUG": "1"},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        running = _Running(process, identify(process.pid) or ProcessId(process.pid, 0))
        self._running[service.name] = running
        restarts = self._state.services[service.name].restarts
        self._update(service.name, ServiceState(process=running.identity, restarts=restarts, detail="running"))
        self._publish(self._state.phase, self._state.message)
        return running

    async def _watch(self) -> None:
        """Ready is when every process runs and the probe finds all of them answering.

        What stops answering is given up after a while and killed, so that it is started again.
        """
        while True:
            self._changed.clear()
            answered, limit, interval = time.monotonic(), self._timing.start_limit, self._timing.probe
            while not self._changed.is_set():
                silent = await self._silent()
                silence = time.monotonic() - answered
                if self._changed.is_set():
                    break
                if silent is None:
                    self._been_ready = True
                    answered, limit, interval = time.monotonic(), self._timing.silence_limit, self._timing.watch
                    if self._state.phase != "ready":
                        self._publish("ready")
                elif silence > limit:
                    self._give_up(silent, limit)
                    await self._changed.wait()
                elif self._state.phase == "ready":
                    self._publish("degraded", f"{silent}: does not answer; after {limit:g} s it is started again")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), interval)

    async def _silent(self) -> str | None:
        """The service that does not run or does not answer."""
        ended = next((name for name, service in self._state.services.items() if service.process is None), None)
        return ended or await self._probe()

    def _give_up(self, name: str, limit: float) -> None:
        if not self._been_ready:
            raise CliError(f"{name}: not ready within {limit:g} s; see redraft logs {name}")
        self._given_up[name] = f"did not answer for {limit:g} s and was killed"
        self._running[name].identity.send_group(signal.SIGKILL)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._publish("stopping", self._state.message)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for service in reversed(self._services):
            if running := self._running.get(service.name):
                await running.end(service.grace)

    def _update(self, name: str, service: ServiceState) -> None:
        self._state = msgspec.structs.replace(self._state, services={**self._state.services, name: service})
        self._changed.set()

    def _publish(self, phase: Phase, message: str = "") -> None:
        """Tell the state; once the deployment serves, a full disk is no reason to stop."""
        self._state = msgspec.structs.replace(self._state, phase=phase, message=message)
        try:
            self._deployment.write(self._state)
        except OSError:
            if not self._been_ready:
                raise
        self._report(self._state)


def _open_end(log: Path) -> int:
    """Where a new run's output begins; a log that has grown large is set aside first."""
    if not log.exists():
        return 0
    if log.stat().st_size > LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
        return 0
    return log.stat().st_size


def _last_words(log: Path, offset: int, returncode: int) -> str:
    """Why a service died, in its own words where it had any: its last ``error: …`` line, else its last line."""
    if not log.exists():
        return describe_exit(returncode)
    with log.open("rb") as file:
        file.seek(max(offset, file.seek(0, os.SEEK_END) - LAST_WORDS))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    if returncode > 0 and lines:
        return f"{lines[-1]} ({describe_exit(returncode)})"
    return describe_exit(returncode)

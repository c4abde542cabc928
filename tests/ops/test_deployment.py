"""A real deployment, through the commands that a person types."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from redraft.engine.checkpoints import DEFAULT_MODEL, resolve
from redraft.ops.deployment import Deployment, State

pytestmark = pytest.mark.integration

README = Path(__file__).parents[2] / "README.md"


@contextmanager
def short_folder() -> Iterator[Path]:
    """A state folder whose path leaves room for a socket's name."""
    with TemporaryDirectory(prefix="redraft-") as folder:
        yield Path(folder)


class Shell:
    """Runs ``redraft`` with a state folder of its own and a free port."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("REDRAFT_", "XDG_RUNTIME"))}
        self.environment |= {"XDG_STATE_HOME": str(folder), "REDRAFT_GATEWAY__PORT": "0", **settings}

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "redraft.ops.cli", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        with self.popen(*arguments) as process:
            out, err = process.communicate(stdin, timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def run_until(
        self, wanted: Callable[[subprocess.CompletedProcess[str]], bool], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command again and again until its outcome is the wanted one."""
        deadline = time.monotonic() + 60
        while not wanted(done := self.run(*arguments)):
            assert time.monotonic() < deadline, done
        return done

    def state(self) -> State:
        (folder,) = (self.folder / "redraft" / "deployments").iterdir()
        state = Deployment(folder).read()
        assert state
        return state

    def pidfds(self) -> list[int]:
        state = self.state()
        processes = [state.supervisor, *(service.process for service in state.services.values())]
        return [os.pidfd_open(process.pid) for process in processes if process]


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with short_folder() as folder:
        shell = Shell(folder)
        up = shell.run("up")
        assert up.returncode == 0, up.stderr
        assert re.match(r"Ready: http://127\.0\.0\.1:\d+/v1\n", up.stdout)
        yield shell
        shell.run("down")


@pytest.fixture
def state() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def all_end(descriptors: list[int]) -> bool:
    """Whether processes opened with ``pidfd_open`` end; waits for them."""
    return all(select.select([descriptor], [], [], 20)[0] for descriptor in descriptors)


def test_up_twice_is_harmless(shell: Shell) -> None:
    before = shell.state()
    again = shell.run("up")
    assert (again.returncode, again.stdout) == (0, f"Already running: {before.url}/v1\n")
    assert shell.state() == before


def test_up_says_that_changed_settings_are_not_in_force(shell: Shell) -> None:
    changed = Shell(shell.folder, REDRAFT_ENGINE__BLOCK_SIZE="4").run("up")
    assert changed.returncode == 0
    assert "Settings have changed since it started" in changed.stdout


def test_status_shows_what_runs(shell: Shell) -> None:
    status = shell.run("status")
    assert status.returncode == 0
    for word in ("ready: http://", "supervisor", "engine", "gateway"):
        assert word in status.stdout


def test_chat_answers_once_and_as_a_conversation(shell: Shell) -> None:
    once = shell.run("chat", "--once", "What is the capital of France?", "--temperature", "0", "--max-tokens", "20")
    assert once.returncode == 0, once.stderr
    assert "Paris" in once.stdout
    talk = shell.run("chat", "--temperature", "0", "--max-tokens", "5", stdin="Hello\n\n/new\nHello\n/quit\n")
    assert talk.returncode == 0, talk.stderr
    first, second = talk.stdout.splitlines()
    assert first == second, "a new conversation starts from nothing"


def test_chat_tells_the_gateways_refusal_in_its_own_words(shell: Shell) -> None:
    refused = shell.run("chat", "--once", "x " * 20_000)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr


def test_the_readmes_example_runs(shell: Shell) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 10
    code = example.replace("http://127.0.0.1:8000", shell.state().url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) > 5


def statistics(shell: Shell) -> dict[str, int]:
    prompt = "Repeat this: the quick brown fox jumps over the lazy dog, the quick brown fox jumps over the lazy dog."
    body = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 40,
        "redraft": {"return_statistics": True},
    }
    answer = httpx.post(f"{shell.state().url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    found: dict[str, int] = answer.raise_for_status().json()["redraft"]
    return found


def test_the_kill_switch_stops_drafting_at_once_and_lets_it_start_again(shell: Shell) -> None:
    assert statistics(shell)["drafted_tokens"] > 0
    for scope in ([], ["--tenant", "default"]):
        assert shell.run("speculation", "off", *scope).returncode == 0
        assert statistics(shell)["drafted_tokens"] == 0
        assert shell.run("speculation", "on", *scope).returncode == 0
        assert statistics(shell)["drafted_tokens"] > 0
    both = shell.run("speculation", "off", "--tenant", "a", "--request", "b")
    assert both.returncode == 2
    assert "exclude each other" in both.stderr
    unknown = shell.run("speculation", "off", "--request", "chatcmpl-nobody")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr == "error: no request chatcmpl-nobody is running\n"


def test_the_kill_switch_reaches_what_runs_whatever_the_configuration_says_now(shell: Shell) -> None:
    changed = Shell(shell.folder, REDRAFT_ENGINE__SOCKET="/tmp/not-there.sock")
    assert changed.run("speculation", "off").returncode == 0
    assert statistics(shell)["drafted_tokens"] == 0
    assert changed.run("speculation", "on").returncode == 0


def test_a_frozen_engine_is_told(shell: Shell) -> None:
    engine = shell.state().services["engine"].process
    assert engine
    engine.send(signal.SIGSTOP)
    try:
        status = shell.run_until(lambda done: done.returncode == 1, "status")
        switch = shell.run("speculation", "on")
    finally:
        engine.send(signal.SIGCONT)
    assert "engine: does not answer; after 30 s it is started again" in status.stdout
    assert "Traceback" not in switch.stderr
    assert shell.run_until(lambda done: done.returncode == 0, "status").returncode == 0


def test_a_killed_engine_comes_back_while_the_gateway_answers(shell: Shell) -> None:
    before = shell.state()
    engine = before.services["engine"].process
    assert engine
    killed = os.pidfd_open(engine.pid)
    signal.pidfd_send_signal(killed, signal.SIGKILL)
    assert all_end([killed])
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = httpx.post(f"{before.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert shell.run("up").returncode == 0
    after = shell.state()
    assert after.services["gateway"].process == before.services["gateway"].process
    assert httpx.post(f"{after.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).is_success


def test_down_ends_every_process(state: Path) -> None:
    shell = Shell(state, REDRAFT_ENGINE__LOSSLESS="tolerant")
    assert shell.run("up").returncode == 0
    descriptors = shell.pidfds()
    down = shell.run("down")
    assert down.returncode == 0
    assert down.stdout.startswith("Stopped http://")
    assert all_end(descriptors)
    assert shell.run("status").returncode == 3


def test_ctrl_c_ends_serve_and_all_it_started(state: Path) -> None:
    shell = Shell(state, REDRAFT_ENGINE__LOSSLESS="tolerant")
    with shell.popen("serve") as serve:
        assert serve.stderr
        for line in serve.stderr:
            if line.startswith("ready"):
                break
        descriptors = shell.pidfds()
        serve.send_signal(signal.SIGINT)
        _, rest = serve.communicate(timeout=60)
        assert serve.returncode == 0
    assert all_end(descriptors)
    assert "Traceback" not in rest


def test_a_missing_model_is_named_with_the_command_that_fetches_it(state: Path, tmp_path: Path) -> None:
    up = Shell(state, XDG_CACHE_HOME=str(tmp_path / "cache")).run("up")
    assert up.returncode == 1
    assert f"redraft models pull {DEFAULT_MODEL}" in up.stderr
    assert "Traceback" not in up.stderr


def test_a_truncated_checkpoint_is_named(state: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve(DEFAULT_MODEL), model)
    weights = next(model.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    up = Shell(state, REDRAFT_ENGINE__MODEL=str(model)).run("up")
    assert up.returncode == 1
    assert weights.name in up.stderr
    assert "Traceback" not in up.stderr

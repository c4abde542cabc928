"""Commands fail in one or two lines that say what to do, and never with a traceback."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.checkpoints import DEFAULT_MODEL, identity
from redraft.engine.checkpoints.models import KNOWN_MODELS, MergedModel
from redraft.ops import cli
from redraft.ops.commands import bench, doctor, options
from redraft.ops.config import load_config
from redraft.ops.deployment import Deployment, Phase, ServiceState, State, in_force
from redraft.ops.processes import identify

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders, port and environment of its own for every test."""
    for name in [name for name in os.environ if name.startswith("REDRAFT_")]:
        monkeypatch.delenv(name)
    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def redraft(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["redraft", *arguments])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    code = leaving.value.code
    assert isinstance(code, int)
    return code


def state(phase: Phase, **fields: Any) -> State:
    me = identify(os.getpid())
    assert me
    return State(supervisor=me, phase=phase, url="http://127.0.0.1:1", config="", **fields)


@pytest.fixture
def taken_port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    yield listener.getsockname()[1]
    listener.close()


@pytest.mark.parametrize("command", [["status"], ["chat", "--once", "hi"], ["logs"], ["down"], ["config", "show"]])
def test_a_wrong_configuration_stops_every_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDRAFT_GATEWAY__PROT", "9000")
    assert redraft(monkeypatch, *command) == 2
    assert capsys.readouterr().err == (
        "error: environment: unknown key REDRAFT_GATEWAY__PROT; did you mean REDRAFT_GATEWAY__PORT?\n"
    )


@pytest.mark.parametrize("key", ["FEEDBACK", "RETRAIN"])
def test_a_folder_that_is_none_is_refused_at_start(
    key: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "file").write_text("")
    for folder, what in (("/dev/null", "/dev/null"), (str(home / "file" / "below"), str(home / "file"))):
        monkeypatch.setenv(f"REDRAFT_{key}__FOLDER", folder)
        assert redraft(monkeypatch, "serve") == 1
        assert capsys.readouterr().err == (
            f"error: {key.lower()}.folder is {folder}, but {what} is no folder; name one, which is made if need be\n"
        )


def test_what_needs_a_running_deployment_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert redraft(monkeypatch, "chat", "--once", "hi") == 1
    assert capsys.readouterr().err == "error: nothing is running here; start it with: redraft up\n"
    assert redraft(monkeypatch, "status") == 3
    assert redraft(monkeypatch, "logs") == 1
    assert "has not run here yet" in capsys.readouterr().err


def test_down_twice_is_harmless(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert redraft(monkeypatch, "down") == redraft(monkeypatch, "down") == 0
    assert capsys.readouterr().out == "Nothing is running here\n" * 2


def test_down_does_not_take_a_start_for_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Deployment.of(load_config(None, {})).lock()
    assert lock is not None
    try:
        assert redraft(monkeypatch, "down") == 1
    finally:
        os.close(lock)
    assert capsys.readouterr().err == "error: it is only just starting; try again in a moment\n"


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_taken_port_is_named_with_what_to_do(
    command: str, taken_port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDRAFT_GATEWAY__PORT", str(taken_port))
    assert redraft(monkeypatch, command) == 1
    error = capfd.readouterr().err
    assert re.search(rf"error: Port {taken_port} .*already in use.*gateway\.port", error)
    assert "Traceback" not in error
    assert Deployment.running() == []


def test_up_tells_a_socket_path_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDRAFT_GATEWAY__PORT", "0")
    monkeypatch.setenv("REDRAFT_ENGINE__SOCKET", "/tmp/" + "x" * 120)
    assert redraft(monkeypatch, "up") == 1
    assert "too long for a socket" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_socket_belongs_to_one_running_deployment(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDRAFT_GATEWAY__PORT", "0")
    monkeypatch.setenv("REDRAFT_ENGINE__SOCKET", str(home / "e.sock"))
    with (home / "e.sock.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert redraft(monkeypatch, command) == 1
    assert re.search(r"e\.sock is another running deployment's.*set engine\.socket", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("file", "environment", "named"),
    [
        (None, {}, "no --config"),
        ("gateway: {port: 9000}", {}, "--config {path}"),
        ("gateway: {port: 9000}", {"REDRAFT_GATEWAY__PORT": "9001"}, "REDRAFT_GATEWAY__PORT=9001, --config {path}"),
        (None, {"REDRAFT_GATEWAY__PORT": "9001"}, "REDRAFT_GATEWAY__PORT=9001, no --config"),
    ],
)
def test_what_runs_elsewhere_is_named_so_that_commands_find_it(
    file: str | None,
    environment: dict[str, str],
    named: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = home / "a.yaml" if file else None
    if path and file:
        path.write_text(file)
    deployment = Deployment.of(load_config(path, environment))
    lock = deployment.lock()
    assert lock is not None
    deployment.write(state("ready", config_path=str(path) if path else None))
    monkeypatch.setenv("REDRAFT_GATEWAY__PORT", "9999")
    try:
        assert redraft(monkeypatch, "status") == 3
    finally:
        os.close(lock)
    assert capsys.readouterr().out.endswith(f"running elsewhere: http://127.0.0.1:1 ({named.format(path=path)})\n")


def test_up_says_why_what_already_runs_keeps_dying_and_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment.of(load_config(None, {}))
    lock = deployment.lock()
    assert lock is not None
    restarts = iter(range(100))

    def die_again(deployment: Deployment) -> State:
        return state(
            "degraded", message="engine: out of paper", services={"engine": ServiceState(restarts=next(restarts))}
        )

    monkeypatch.setattr(Deployment, "read", die_again)
    try:
        assert redraft(monkeypatch, "up") == 1
    finally:
        os.close(lock)
    error = capsys.readouterr().err
    assert "degraded: engine: out of paper" in error
    assert error.endswith("error: engine: out of paper\nIt keeps dying; it goes on being started until redraft down\n")


def test_a_command_to_type_next_works_where_redraft_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    loaded = load_config(Path("configs/quickstart.yaml"), {})
    monkeypatch.setattr(sys, "argv", [".venv/bin/redraft", "up"])
    assert options.typed("chat", loaded) == ".venv/bin/redraft chat --config configs/quickstart.yaml"
    monkeypatch.setattr(sys, "argv", ["/lib/redraft/ops/cli.py", "up"])
    assert options.typed("chat", load_config(None, {})) == "redraft chat"


def test_a_fault_of_ours_is_one_message_unless_the_traceback_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cli, "app", broken)
    assert redraft(monkeypatch) == 1
    error = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: planted" in error
    assert "Traceback" not in error
    monkeypatch.setenv("REDRAFT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_model_that_is_not_here_is_named_with_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert redraft(monkeypatch, "models", "show") == 1
    assert f"redraft models pull {DEFAULT_MODEL}\n" in capsys.readouterr().err
    assert redraft(monkeypatch, "models", "pull", "no such model") == 1
    error = capsys.readouterr().err
    assert "no model 'no such model'" in error
    assert f"redraft models pull {DEFAULT_MODEL}\n" in error
    assert redraft(monkeypatch, "models", "ls") == 0
    listed = capsys.readouterr().out
    for name in (DEFAULT_MODEL, "smollm2-135m"):
        assert re.search(rf"^{name} .*Apache-2.0.*not here", listed, re.MULTILINE)


def test_a_benchmark_prints_one_json_object_alone_and_an_unknown_one_names_the_known(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "toy.py").write_text("\ndef run(quick: bool) -> dict[str, object]:\n    return {'quick': quick}\n")
    (home / "bare.py").write_text("import no_such_package\ndef run(quick: bool) -> None: ...\n")
    (home / "helper.py").write_text("def other() -> None: ...\n")
    monkeypatch.setattr(bench.benches, "__path__", [str(home)])
    assert redraft(monkeypatch, "bench", "toy", "--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"quick": True}
    assert redraft(monkeypatch, "bench", "bare") == 1
    assert capsys.readouterr().err == "error: bare needs no_such_package: pip install 'redraft[engine,dev]'\n"
    assert redraft(monkeypatch, "bench", "helper") == 2
    assert capsys.readouterr().err == "error: no benchmark helper; there are: bare, toy\n"


def test_doctor_names_what_is_wrong_and_how_to_mend_it(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDRAFT_GATEWAY__PORT", str(taken_port))
    assert redraft(monkeypatch, "doctor") == 1
    out = capsys.readouterr().out
    assert re.search(rf"fail  model {DEFAULT_MODEL}\n +Model .*redraft models pull", out)
    assert re.search(r"fail  127\.0\.0\.1:\d+ cannot be listened on\n +Port .*gateway\.port", out)
    failures = [finding for finding in doctor.check(None) if finding.level == "fail"]
    assert all(finding.mend for finding in failures)


def test_doctor_says_that_a_machine_without_proc_needs_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROC", home / "no-proc")
    assert redraft(monkeypatch, "doctor") == 1
    out = capsys.readouterr().out
    assert re.search(r"fail  /proc is not there.*\n +Mount it", out)
    assert "127.0.0.1:8000" in out, "what comes after is looked at too"


def test_doctor_notices_weights_that_are_not_what_was_pulled(
    home: Path, make_checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, merged = make_checkpoint(), KNOWN_MODELS[DEFAULT_MODEL]
    assert isinstance(merged, MergedModel)
    for model, identity_then, is_what_was_pulled in (
        ("smollm2-135m", identity(checkpoint), True),
        ("smollm2-135m", "0" * 64, False),
        (DEFAULT_MODEL, merged.identity, False),
    ):
        folder = home / "cache" / "redraft" / "models" / model
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        (folder / "redraft.json").write_text(json.dumps({"identity": identity_then}))
        monkeypatch.setenv("REDRAFT_ENGINE__MODEL", model)
        said = [finding.what for finding in doctor.check(None) if finding.level == "fail" and "model" in finding.what]
        assert said == ([] if is_what_was_pulled else [f"model {model} is not what was pulled"])


def test_doctor_says_where_there_is_no_such_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    for drafter, is_there in (
        ("none", True),
        ("dflash", True),
        (str(tmp_path / "drafter"), True),
        (str(tmp_path / "run"), False),
        ("nonsense", False),
    ):
        monkeypatch.setenv("REDRAFT_ENGINE__DRAFTER", drafter)
        said = [finding.what for finding in doctor.check(None) if finding.level == "fail" and "drafter" in finding.what]
        assert said == ([] if is_there else [f"no drafter {drafter}"])


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"sglang": "0.5.17", "torch": "2.13.0"}, "extras gpu and engine are installed together"),
        (
            {"sglang": "0.5.17", "torch": "2.11.0", "mooncake-transfer-engine-non-cuda": "0.3.13"},
            "extras gpu and cluster are installed together",
        ),
        ({}, "no torch"),
    ],
)
def test_doctor_finds_extras_that_cannot_live_together(
    installed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", installed.get)
    assert any(said in finding.what and finding.level == "fail" for finding in doctor.check(None))


def test_a_folder_that_cannot_be_written_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "state").write_text("a file where a folder has to be")
    assert redraft(monkeypatch, "up") == 1
    assert re.fullmatch(r"error: /.*/state/redraft/deployments/8000: Not a directory\n", capsys.readouterr().err)


def test_a_reader_that_leaves_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = home / "state" / "redraft" / "deployments" / "8000" / "engine.log"
    log.parent.mkdir(parents=True)
    log.write_text("word\n" * 100_000)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "redraft.ops.cli", "logs", "-n", "100000"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""


def test_help_of_every_command_is_there() -> None:
    done = subprocess.run([sys.executable, "-m", "redraft.ops.cli"], capture_output=True, text=True)
    listed = set(re.findall(r"│ (\w+)", done.stdout))
    assert {"up", "down", "serve", "status", "logs", "models", "chat", "doctor", "config", "bench"} <= listed


def test_commands_look_at_what_a_deployment_runs_with_whatever_its_file_says_since(home: Path) -> None:
    path = home / "redraft.yaml"
    path.write_text("feedback: {folder: new}\n")
    assert in_force(path)[0].feedback.folder == home / "new"
    deployment = Deployment.of(load_config(path, {}))
    lock = deployment.lock()
    assert lock is not None
    deployment.effective_config.write_text("feedback: {folder: /old}\n")
    try:
        config, running = in_force(path)
    finally:
        os.close(lock)
    assert (config.feedback.folder, running) == (Path("/old"), True)

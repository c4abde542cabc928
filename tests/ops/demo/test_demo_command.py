"""The demo as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = pytest.mark.integration

COMMAND = (sys.executable, "-m", "redraft.ops.cli", "demo", "drift", "--fast", "--out")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path leaves room for a socket's name."""
    with TemporaryDirectory(prefix="demo-") as folder:
        yield Path(folder)


def processes_under(folder: Path) -> list[str]:
    """Command lines of processes that were told of a file in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_starts_it_leaves_no_process_and_no_file(temporary: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(
        (*COMMAND, str(temporary / "out")), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        deadline = time.monotonic() + 120
        while not any("_engine" in line for line in processes_under(temporary)):
            assert demo.poll() is None, demo.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        demo.send_signal(number)
        _, err = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert "nothing was left running" in err
    assert "Traceback" not in err
    assert processes_under(temporary) == []
    assert [path.name for path in temporary.iterdir()] == ["out"]


def test_the_fast_story_ends_well(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        (*COMMAND, str(temporary / "out")), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((temporary / "out" / "result.json").read_text())
    assert result["run"]["outcome"] == "promoted"
    assert (result["failed_requests"], result["lossless_violations"]) == (0, 0)
    assert result["poisoned"]["outcome"] == "refused"
    old, new = (result["judged"][side] for side in ("old", "new"))
    assert new["committed"] / new["verify_steps"] > 1.15 * old["committed"] / old["verify_steps"]
    assert "Redraft noticed after" in done.stdout
    assert (temporary / "out" / "gate-report" / "report.md").exists()
    assert "gate-report/report.md" in done.stdout
    told = [line[0] for line in done.stderr.splitlines() if line[:2].rstrip(".").isdigit()]
    assert told == list("123456789")

"""Training leaves nothing among temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SCRIPT = """
import os, torch
from redraft.retrain.optimizer import adamw
weight = torch.nn.Parameter(torch.ones(2))
for _ in "twice":
    optimizer = adamw([weight], lr=0.1, fused=True)
weight.sum().backward()
optimizer.step()
print(float(weight[0]), "TORCHINDUCTOR_CACHE_DIR" in os.environ)
"""


def test_an_optimizer_steps_and_leaves_no_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        (sys.executable, "-c", SCRIPT), env={**environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    value, named = done.stdout.split()
    assert (round(float(value), 2), named) == (0.9, "False")
    assert list(tmp_path.iterdir()) == []

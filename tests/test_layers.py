"""Folders import one another in one direction, and heavy libraries are imported only where they belong."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "engine": ("engine", "kernels"),
    "kernels": ("kernels",),
    "feedback": ("feedback", "engine.types"),
    "retrain": ("retrain", "engine", "kernels", "feedback"),
    "gateway": ("gateway", "engine.types", "engine.protocol", "engine.chat", "feedback"),
    "ops": ("ops", "engine", "kernels", "feedback", "retrain", "gateway"),
}
"""What each folder may import of ours."""

LIBRARIES = {
    "torch": ("engine/embedded", "engine/drafters", "kernels", "retrain", "ops/bench"),
    "sglang": ("engine/sglang",),
    "transformers": ("ops/bench", "retrain/agent_target"),
}
"""Where each library may be imported; benchmarks compare with what others do, and the target's adapter is
trained, in torch and transformers."""


def imports(source: str) -> Iterator[str]:
    """Full names of what a module imports, wherever in it; ``from a import b`` is ``a.b``, for b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, allowed: str, separator: str) -> bool:
    return name == allowed or name.startswith(allowed + separator)


def imported() -> list[tuple[str, str]]:
    """Every (file, imported name) of every package."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [(str(file.relative_to(ROOT)), name) for file in files for name in imports(file.read_text("utf-8"))]


def test_every_package_has_its_rule() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(project["tool"]["setuptools"]["package-dir"].values()) == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    ours = [(file, name) for file, name in imported() if within(file, folder, "/") and within(name, "redraft", ".")]
    allowed = [f"redraft.{part}" for part in FOLDERS[folder]]
    assert [(file, name) for file, name in ours if not any(within(name, part, ".") for part in allowed)] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_heavy_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = [file for file, name in imported() if within(name, library, ".")]
    assert [file for file in users if not any(within(file, part, "/") for part in LIBRARIES[library])] == []


def test_no_folder_is_imported_by_its_bare_name() -> None:
    assert [(file, name) for file, name in imported() if name.partition(".")[0] in FOLDERS] == []

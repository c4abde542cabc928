"""Running a benchmark."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import redraft.ops.bench as benches
from redraft.ops.errors import CliError, UsageError


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark.")],
    quick: Annotated[bool, typer.Option(help="Fewer loads and sessions, the same definitions.")] = False,
    drafters: Annotated[
        Path | None,
        typer.Option(help="With drafters and drafters-gpu: further checkpoints, each in a folder by its name."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object alone on standard output.")] = False,
) -> None:
    """Measure something; progress goes to standard error."""
    known = _names()
    if name not in known:
        raise UsageError(f"no benchmark {name}; there are: {', '.join(known) or 'none'}")
    more = {} if drafters is None else {"drafters": drafters}
    if more and not name.startswith("drafters"):
        raise UsageError(f"--drafters goes with the benchmarks drafters and drafters-gpu, not with {name}")
    with contextlib.redirect_stdout(sys.stderr):
        try:
            module = importlib.import_module(f"redraft.ops.bench.{name.replace('-', '_')}")
        except ModuleNotFoundError as error:
            raise CliError(f"{name} needs {error.name}: pip install 'redraft[engine,dev]'") from None
        result = module.run(quick=quick, **more)
    if as_json:
        print(json.dumps(result))
    else:
        json.dump(result, sys.stdout, indent=2)
        print()


def _names() -> list[str]:
    """The modules that define ``run``, found without importing them."""
    files = Path(benches.__path__[0]).glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if "\ndef run(" in file.read_text(encoding="utf-8"))

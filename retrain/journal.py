"""What a run writes while it goes on: a line of JSON an entry, and TensorBoard's events where that is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from redraft.retrain.files import replace


class Journal:
    """Appends to ``log.jsonl``, from which entries after ``step`` are dropped first: a resumed run makes them again.

    So is a damaged line and all after it. A number that is none is written as null.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._file = folder / "log.jsonl"
        if self._file.exists():
            lines = self._file.read_bytes().rpartition(b"\n")[0].splitlines()
            kept = takewhile(lambda line: _is_up_to(step, line), lines)
            replace(self._file, b"".join(line + b"\n" for line in kept))
        self._stream = self._file.open("ab", buffering=0)
        self._writer = _writer(folder / "tensorboard", step)

    def add(self, step: int, values: Mapping[str, float | list[float]]) -> None:
        """Raises `OSError` with the log's name where it cannot be written."""
        try:
            self._stream.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file)) from error
        if self._writer:
            for name, value in values.items():
                numbers = (
                    {f"{name}/{slot}": each for slot, each in enumerate(value, 1)}
                    if isinstance(value, list)
                    else {name: value}
                )
                for each, number in numbers.items():
                    self._writer.add_scalar(each, number, step)

    def close(self) -> None:
        self._stream.close()
        if self._writer:
            self._writer.close()


def _is_up_to(step: int, line: bytes) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, LookupError, TypeError):
        return False


def _writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)

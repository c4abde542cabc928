"""What a run writes while it goes on: a line of JSON an entry, and TensorBoard's events where that is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from redraft.retrain.errors import TrainingError


class Journal:
    """Appends to ``log.jsonl``, from which entries after ``step`` are dropped first: a resumed run makes them again.

    A number that is none is written as null.
    """

    def __init__(self, folder: Path, step: int) -> None:
        file = folder / "log.jsonl"
        if file.exists():
            whole = file.read_text().rpartition("\n")[0].splitlines()
            try:
                kept = [line for line in whole if json.loads(line)["step"] <= step]
            except (ValueError, LookupError, TypeError) as error:
                raise TrainingError(f"{file} is damaged; move it away to go on without it") from error
            file.write_text("".join(f"{line}\n" for line in kept))
        self._stream = file.open("a")
        self._writer = _writer(folder / "tensorboard", step)

    def add(self, step: int, values: Mapping[str, float | list[float]]) -> None:
        self._stream.write(msgspec.json.encode({"step": step, **values}).decode() + "\n")
        self._stream.flush()
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


def _writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)

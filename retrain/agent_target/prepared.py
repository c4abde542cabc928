"""The one file that travels to where training runs: token ids, what of them is learnt, and cases to be scored on."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from redraft.engine.chat.messages import Tool
from redraft.retrain.agent_target.recipe import Recipe
from redraft.retrain.data.conversation import Source
from redraft.retrain.data.errors import DataError

PLAIN_SOURCES: tuple[Source, ...] = ("plain", "math", "code")
SIMPLE = ("simple_python", "live_simple")
ABSTAINING = ("irrelevance", "live_irrelevance")
"""BFCL's categories of one call of one function, and of requests that no function fits."""


class Example(Struct, frozen=True, array_like=True):
    """Token ids and the supervised [start, end) spans of them."""

    source: Source
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Case(Struct, frozen=True):
    """A prompt of the test split and what answers it.

    ``calls`` are BFCL's ground truth: for each expected call its function's name and, by argument, the admissible
    values; none where nothing is to be called.
    """

    id: str
    tools: tuple[Tool, ...]
    calls: tuple[tuple[str, dict[str, list[Any]]], ...] = ()


class Prepared(Struct, frozen=True):
    """``train`` and ``held_out`` (of the calibrate split) examples, and the ``cases``; ``identity`` is the base's.

    ``commit`` is that of the code that made the replies.
    """

    recipe: Recipe
    commit: str | None
    identity: str
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    cases: tuple[Case, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Training examples by source."""
        return dict(sorted(Counter(example.source for example in self.train).items()))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    def write(self, file: Path) -> None:
        file.write_bytes(gzip.compress(msgspec.msgpack.encode(self), mtime=0))


def read(file: Path) -> Prepared:
    try:
        return msgspec.msgpack.decode(gzip.decompress(file.read_bytes()), type=Prepared)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (EOFError, zlib.error, msgspec.DecodeError) as error:
        raise DataError(f"{file} is not what `prepare` writes: {error}.") from error


def category_of(case: str) -> str:
    """BFCL's category, which a case's id begins with."""
    return case.rpartition("_")[0]

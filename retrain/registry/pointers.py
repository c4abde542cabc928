"""Serving pointers as files, one a target, changed by compare-and-set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from redraft.engine.types import DrafterPointer
from redraft.retrain.files import locked, replace
from redraft.retrain.registry.errors import RegistryError

WATCH_SECONDS = 0.2
"""Between two looks at a pointer that is watched."""


class FilePointerStore:
    """A `PointerStore` of one machine under ``root``; raises `RegistryError` where a pointer cannot be read."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def read(self, target: str) -> DrafterPointer | None:
        return self.load(target)

    async def compare_and_set(self, expected_token: int, pointer: DrafterPointer) -> bool:
        """``pointer.token`` must be above ``expected_token``, which is 0 where no pointer is expected."""
        if pointer.token <= expected_token:
            raise ValueError(f"token {pointer.token} does not follow {expected_token}")
        return await asyncio.to_thread(self._compare_and_set, expected_token, pointer)

    async def watch(self, target: str) -> AsyncIterator[DrafterPointer]:
        """Looks every WATCH_SECONDS: of changes in quick succession the last one is seen."""
        token = 0
        while True:
            pointer = await self.read(target)
            if pointer is not None and pointer.token != token:
                token = pointer.token
                yield pointer
            await asyncio.sleep(WATCH_SECONDS)

    def load(self, target: str) -> DrafterPointer | None:
        """`read` for those without an event loop."""
        file = self._file(target)
        try:
            return msgspec.json.decode(file.read_bytes(), type=DrafterPointer)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RegistryError(f"{file} cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise RegistryError(
                f"{file} is damaged ({error}); restore it, or move it away: then the configuration decides who serves"
            ) from error

    def _compare_and_set(self, expected_token: int, pointer: DrafterPointer) -> bool:
        file = self._file(pointer.target)
        with locked(file.with_suffix(".lock")):
            present = self.load(pointer.target)
            if (present.token if present else 0) != expected_token:
                return False
            replace(file, msgspec.json.format(msgspec.json.encode(pointer)) + b"\n")
        return True

    def _file(self, target: str) -> Path:
        return self._root / target / "pointer.json"

"""The serving pointer: of all who want to change it from one token, one does; readers see it whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from redraft.engine.protocol import PointerStore
from redraft.engine.types import Canary, DrafterPointer, DrafterVersion
from redraft.retrain.registry import pointers
from redraft.retrain.registry.errors import RegistryError
from redraft.retrain.registry.pointers import FilePointerStore

from .conftest import TARGET, killed_everywhere

pytestmark = pytest.mark.unit


def pointer(token: int, name: str = "a", target: str = TARGET) -> DrafterPointer:
    return DrafterPointer(target=target, serving=DrafterVersion("dflash", name), token=token)


def set_pointer(store: FilePointerStore, token: int, name: str = "a") -> bool:
    return asyncio.run(store.compare_and_set(token - 1, pointer(token, name)))


async def test_what_was_set_is_read_and_targets_are_apart(tmp_path: Path) -> None:
    store: PointerStore = FilePointerStore(tmp_path)
    assert await store.read(TARGET) is None
    version = DrafterVersion("dflash", "b")
    full = DrafterPointer(
        target=TARGET,
        serving=version,
        previous=DrafterVersion("ngram", "builtin"),
        canary=Canary(version, 0.1),
        pins={"tenant": version},
        token=1,
    )
    assert await store.compare_and_set(0, full)
    assert await store.compare_and_set(0, pointer(1, target="other"))
    assert await FilePointerStore(tmp_path).read(TARGET) == full
    assert await store.read("other") == pointer(1, target="other")


async def test_a_late_writer_changes_nothing(tmp_path: Path) -> None:
    store = FilePointerStore(tmp_path)
    assert await store.compare_and_set(0, pointer(1, "first"))
    assert not await store.compare_and_set(0, pointer(1, "late"))
    assert not await store.compare_and_set(5, pointer(6, "from nowhere"))
    assert await store.read(TARGET) == pointer(1, "first")
    with pytest.raises(ValueError, match="token 3 does not follow 3"):
        await store.compare_and_set(3, pointer(3))
    with pytest.raises(ValueError, match="token 0 does not follow 0"):
        await store.compare_and_set(0, pointer(0))


@pytest.mark.parametrize("writers", [2, 5])
def test_of_processes_that_race_one_wins_each_token(writers: int, tmp_path: Path) -> None:
    last = 60
    children = []
    for writer in range(writers):
        child = os.fork()
        if not child:
            status = 1
            try:
                status = race(FilePointerStore(tmp_path), str(writer), last, tmp_path / f"won-{writer}")
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * writers
    won = [int(token) for file in tmp_path.glob("won-*") for token in file.read_text().split()]
    assert sorted(won) == list(range(1, last + 1))


def race(store: FilePointerStore, name: str, last: int, won: Path) -> int:
    tokens = []
    while (token := present.token if (present := store.load(TARGET)) else 0) < last:
        if set_pointer(store, token + 1, name):
            tokens.append(token + 1)
    won.write_text(" ".join(map(str, tokens)))
    return 0


async def test_a_watcher_sees_the_present_pointer_and_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointers, "WATCH_SECONDS", 0.001)
    store = FilePointerStore(tmp_path)
    watching = store.watch(TARGET)
    first = asyncio.ensure_future(anext(watching))
    for token in range(1, 4):
        assert await store.compare_and_set(token - 1, pointer(token))
        assert await first == pointer(token)
        first = asyncio.ensure_future(anext(watching))
    first.cancel()


def test_a_damaged_pointer_is_named_with_what_to_do(tmp_path: Path) -> None:
    store = FilePointerStore(tmp_path)
    set_pointer(store, 1)
    file = tmp_path / TARGET / "pointer.json"
    file.write_text("{")
    with pytest.raises(RegistryError, match=r"pointer\.json is damaged .*move it away"):
        store.load(TARGET)
    with pytest.raises(RegistryError, match="is damaged"):
        set_pointer(store, 2)


def test_a_writer_killed_anywhere_leaves_the_old_pointer_or_the_new(tmp_path: Path) -> None:
    store = FilePointerStore(tmp_path)
    tokens = []

    def prepare() -> Callable[[], None]:
        tokens.append(present.token if (present := store.load(TARGET)) else 0)
        return lambda: void(store._compare_and_set(tokens[-1], pointer(tokens[-1] + 1)))

    def check() -> None:
        present = store.load(TARGET)
        assert (present.token if present else 0) - tokens[-1] in (0, 1)
        assert set_pointer(store, present.token + 1 if present else 1)

    assert killed_everywhere(prepare, check) > 3


def void(_: object) -> None: ...

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from redraft.engine.types import FeatureRef
from redraft.retrain import features_store
from redraft.retrain.features_store import FeatureStore, LocalStore, MemoryStore

pytestmark = pytest.mark.unit

BUDGET = 1 << 16


def ref(sample: str, rows: int = 8, store: str = "local", generation: int = features_store.GENERATION) -> FeatureRef:
    return FeatureRef(
        sample_id=sample,
        store=store,
        generation=generation,
        row_start=0,
        row_end=rows,
        layer_ids=(1, 4),
        target="target",
    )


def rows_of(seed: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FeatureStore:
    make: dict[str, Callable[[], FeatureStore]] = {
        "memory": lambda: MemoryStore(BUDGET),
        "local": lambda: LocalStore(tmp_path, BUDGET),
    }
    return make[request.param]()


def test_rows_come_back_bit_for_bit_and_what_was_never_kept_does_not(store: FeatureStore) -> None:
    one, other = (ref(name, store=store.name) for name in "ab")
    store.put(one, rows_of(1))
    found = store.get(one)
    assert found is not None
    assert torch.equal(found, rows_of(1))
    assert one in store
    assert store.get(other) is None
    assert other not in store
    for changed in ({"target": "another"}, {"layer_ids": (1, 5)}, {"row_end": 9}, {"generation": 0}):
        assert store.get(msgspec.structs.replace(one, **changed)) is None


def test_the_byte_budget_holds_and_bytes_are_known(store: FeatureStore) -> None:
    assert store.bytes == 0
    for number in range(3):
        store.put(ref(str(number), store=store.name), rows_of(number))
    assert store.bytes // store.refs >= rows_of(0).nbytes
    for number in range(3, 2 * BUDGET // rows_of(0).nbytes):
        store.put(ref(str(number), store=store.name), rows_of(number))
        assert store.bytes <= BUDGET
    store.put(ref("huge", rows=1 << 14, store=store.name), rows_of(0, 1 << 14))
    assert store.get(ref("huge", rows=1 << 14, store=store.name)) is None
    assert store.bytes <= BUDGET


def test_the_oldest_files_make_room_for_the_next_process_too(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, BUDGET)
    for number in range(4):
        store.put(ref(str(number)), rows_of(number))
    size = store.bytes // 4
    for number, file in enumerate(sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)):
        os.utime(file, (number, number))
    again = LocalStore(tmp_path, 3 * size)
    assert [again.get(ref(str(number))) is not None for number in range(4)] == [False, True, True, True]
    again.put(ref("new"), rows_of(9))
    assert [ref(name) in again for name in ("1", "2", "3", "new")] == [False, True, True, True]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == again.bytes <= 3 * size


def test_a_damaged_cut_or_missing_file_counts_as_missing_and_is_replaced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, BUDGET)
    store.put(ref("a"), rows_of(1))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for damaged in (b"", b"nonsense", whole[:-1], whole[: len(whole) // 2], bytes(flipped)):
        file.write_bytes(damaged)
        assert LocalStore(tmp_path, BUDGET).get(ref("a")) is None
        assert not file.exists(), "what is damaged is not met again"
    store.put(ref("a"), rows_of(1))
    file.unlink()
    assert store.get(ref("a")) is None
    store.put(ref("a"), rows_of(1))
    assert store.get(ref("a")) is not None
    assert store.bytes == len(whole)


def test_a_write_that_was_broken_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "left.partial").touch()
    store = LocalStore(tmp_path, BUDGET)
    monkeypatch.setattr(features_store, "save_file", full)
    store.put(ref("a"), rows_of(1))
    assert store.get(ref("a")) is None
    assert list(tmp_path.iterdir()) == []
    assert store.bytes == 0


def test_another_generation_s_files_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path, BUDGET).put(ref("a"), rows_of(1))
    later = LocalStore(tmp_path, BUDGET)
    assert later.get(ref("a", generation=later.generation + 1)) is None
    assert later.get(ref("a")) is not None


def test_only_its_user_may_read_a_folder_of_features_whoever_made_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    LocalStore(tmp_path, BUDGET)
    assert tmp_path.stat().st_mode & 0o777 == 0o700

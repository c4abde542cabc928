"""Tokens come back exactly, to their tenant alone, until they expire or are erased."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redraft.engine.types import SamplingParams
from redraft.feedback.contexts import TurnContext, context_id
from redraft.feedback.local_contexts import LocalContextStore

pytestmark = pytest.mark.unit


def make_context(tokens: Any = (1, 2, 3), **changes: Any) -> TurnContext:
    fields: dict[str, Any] = {
        "tenant": "default",
        "session": "s",
        "time": 1000.5,
        "target": "target",
        "token_ids": tuple(tokens),
        "prompt_tokens": 2,
        "sampling": SamplingParams(temperature=0.3, seed=5, logit_bias=((3, 1.0),)),
    }
    return TurnContext(**{**fields, **changes})


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def a_session(turns: int, seed: int = 0, **changes: Any) -> list[TurnContext]:
    """Each turn goes on from the last."""
    rng = random.Random(seed)
    tokens: list[int] = []
    contexts = []
    for turn in range(turns):
        tokens += [rng.randrange(200_000) for _ in range(100)]
        contexts.append(make_context(tokens, prompt_tokens=len(tokens) - 20, time=1000.0 + turn, **changes))
    return contexts


def test_turns_come_back_as_they_were_in_any_process(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path)
    contexts = [*a_session(5), make_context(()), make_context([2**32 - 1]), *a_session(3, seed=1, session="t")]
    contexts += [make_context(contexts[2].token_ids[:150]), make_context([7, *contexts[2].token_ids])]
    ids = [store.put(context) for context in contexts]
    assert ids == [context_id(context) for context in contexts]
    for reader in (store, LocalContextStore(tmp_path)):
        assert [reader.get("default", id_) for id_ in ids] == contexts
        assert sorted(reader.ids("default")) == sorted(ids)
    assert len(files(tmp_path)) == 2, "a file a session"


def test_a_turn_costs_what_it_adds(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path)
    sizes = []
    for context in a_session(10):
        store.put(context)
        sizes.append(store.size())
    assert sizes[-1] < 1.3 * 10 * sizes[0]
    another = LocalContextStore(tmp_path)
    longer = [*a_session(10)[-1].token_ids, 1, 2, 3]
    another.put(make_context(longer))
    assert store.size() - sizes[-1] < 250


def test_equal_turns_are_kept_once(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path)
    first = store.put(make_context())
    size = store.size()
    assert store.put(make_context()) == first
    assert LocalContextStore(tmp_path).put(make_context()) == first
    assert store.size() == size
    assert store.put(make_context(tenant="other")) != first


def test_no_tenant_gets_anothers_and_no_name_leaves_the_folder(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path / "store")
    names = ["default", "..", "../..", "/etc", "a/b", "", "\0", "é" * 300]
    kept = {name: store.put(make_context(tenant=name, session=name)) for name in names}
    for name, id_ in kept.items():
        assert [other for other in names if store.get(other, id_) is not None] == [name]
    (tmp_path / "outside").write_text("secret")
    for id_ in ("../../../outside", "..", "", "/", "x" * 40, kept["default"].upper(), kept["default"] + "\n", "0" * 40):
        assert store.get("default", id_) is None
    assert {path.name for path in tmp_path.iterdir()} == {"store", "outside"}


def test_a_session_or_a_tenant_is_erased_without_a_trace(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path)
    first, second = a_session(3), a_session(2, session="t")
    other = store.put(make_context(tenant="other"))
    ids = [store.put(context) for context in (*first, *second)]
    assert LocalContextStore(tmp_path).erase("default", "s") == 3
    assert [store.get("default", id_) for id_ in ids] == [None] * 3 + second
    again = store.put(first[2])
    assert store.get("default", again) == first[2], "a writer notices what another process erased"
    assert store.erase("default") == 3
    assert list(store.ids("default")) == []
    assert store.get("other", other) is not None
    assert store.erase("nobody") == store.erase("default", "s") == 0
    assert len(files(tmp_path)) == 1


def test_turns_expire_by_their_time_and_the_rest_of_a_session_stays(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path)
    contexts = a_session(6)
    ids = [store.put(context) for context in contexts]
    assert store.expire(1003.0) == 3
    assert [store.get("default", id_) for id_ in ids] == [None, None, None, *contexts[3:]]
    follow = make_context([*contexts[-1].token_ids, 4], time=1010.0)
    assert store.get("default", store.put(follow)) == follow
    assert store.expire(1003.0) == 0
    assert store.expire(2000.0) == 4
    assert files(tmp_path) == []


def test_what_a_crash_left_of_a_rewriting_is_forgotten_with_its_session(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path)
    for context in a_session(2):
        store.put(context)
    (path,) = files(tmp_path)
    left = path.with_name(f".{path.name}.new")
    left.write_bytes(path.read_bytes())
    assert len(list(store.ids("default"))) == 2
    assert store.expire(0) == 0
    assert store.erase("default", "s") == 2
    assert files(tmp_path) == []


def test_beyond_its_bytes_the_sessions_begun_first_go(tmp_path: Path) -> None:
    contexts = [make_context(range(500), session=str(at), time=1000.0 + at) for at in range(20)]
    unbounded = LocalContextStore(tmp_path)
    ids = [unbounded.put(context) for context in contexts]
    limit = unbounded.size() // 2
    assert 10 <= LocalContextStore(tmp_path, max_bytes=limit).expire(0) <= 11
    assert unbounded.size() <= limit
    assert [unbounded.get("default", id_) for id_ in ids[-9:]] == contexts[-9:]
    assert unbounded.get("default", ids[0]) is None


@pytest.mark.parametrize("fault", ["cut", "flip", "garbage"])
def test_a_damaged_file_is_missing_is_counted_and_takes_new_turns(tmp_path: Path, fault: str) -> None:
    store = LocalContextStore(tmp_path)
    contexts = a_session(3)
    ids = [store.put(context) for context in contexts]
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    match fault:
        case "cut":
            data = data[:-5]
        case "flip":
            data[-20] ^= 4
        case "garbage":
            data += b"garbage"
    path.write_bytes(data)
    reader = LocalContextStore(tmp_path)
    kept = 3 if fault == "garbage" else 2
    assert [reader.get("default", id_) for id_ in ids] == contexts[:kept] + [None] * (3 - kept)
    assert sorted(reader.ids("default")) == sorted(ids[:kept])
    assert reader.damaged > 0
    writer = LocalContextStore(tmp_path)
    assert writer.get("default", writer.put(contexts[2])) == contexts[2]
    assert writer.get("default", ids[0]) == contexts[0]


def test_a_session_that_never_ends_takes_further_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.feedback.local_contexts.FILE_BYTES", 1000)
    store = LocalContextStore(tmp_path)
    contexts = a_session(12)
    ids = [store.put(context) for context in contexts]
    assert len(files(tmp_path)) > 3
    assert max(path.stat().st_size for path in files(tmp_path)) < 4000
    assert [store.get("default", id_) for id_ in ids] == contexts
    assert store.erase("default", "s") == 12


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    store = LocalContextStore(tmp_path / "store")
    store.put(make_context())
    for path in (tmp_path / "store").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert b"default" not in os.fsencode("".join(str(path.relative_to(tmp_path)) for path in files(tmp_path)))


def test_a_folder_that_cannot_be_made_is_an_error_and_holds_nothing(unwritable: Path) -> None:
    store = LocalContextStore(unwritable)
    with pytest.raises(OSError, match=str(unwritable.parent)):
        store.put(make_context())
    assert store.get("default", context_id(make_context())) is None
    assert store.expire(1e12) == store.erase("default") == 0


def test_an_id_follows_from_everything_in_a_turn() -> None:
    base = make_context()
    changes: dict[str, Any] = {
        "tenant": "x",
        "session": "x",
        "time": 1.0,
        "target": "x",
        "token_ids": (1, 2, 4),
        "prompt_tokens": 1,
        "sampling": SamplingParams(),
    }
    assert set(changes) == set(TurnContext.__struct_fields__)
    ids = {context_id(msgspec.structs.replace(base, **{field: value})) for field, value in changes.items()}
    assert len(ids | {context_id(base)}) == len(changes) + 1

"""A swap happens whole or not at all, in the order that cannot leave an engine with what it cannot load."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from redraft.engine.protocol import Engine, EngineError, EngineUnavailable, RequestRefused
from redraft.engine.types import FLOOR, DrafterPointer, DrafterVersion, Health
from redraft.retrain import publisher as publishing
from redraft.retrain.publisher import Publisher, serving_drafter
from redraft.retrain.registry.errors import RegistryError, UnknownVersion
from redraft.retrain.registry.pointers import FilePointerStore
from redraft.retrain.registry.registry import Registry

from .conftest import TARGET, Drafters, accepted, add, killed_everywhere

pytestmark = pytest.mark.unit


class FakeEngine:
    """Keeps what it was asked; fails where told to."""

    def __init__(self) -> None:
        self.ready = True
        self.loaded: list[DrafterVersion] = []
        self.pointer: DrafterPointer | None = None
        self.load_error: EngineError | None = None
        self.activate_error: EngineError | None = None
        self.hangs = False
        self.while_loading: Callable[[], None] = lambda: None

    async def health(self) -> Health:
        token = self.pointer.token if self.pointer else 0
        return Health(ready=self.ready, detail="" if self.ready else "still loading", token=token)

    async def load_drafter(self, version: DrafterVersion, path: Path) -> None:
        assert (path / "config.json").exists()
        self.while_loading()
        if self.hangs:
            await asyncio.Event().wait()
        if self.load_error:
            raise self.load_error
        self.loaded.append(version)

    async def activate(self, pointer: DrafterPointer) -> None:
        if self.activate_error:
            raise self.activate_error
        assert pointer.serving == FLOOR or pointer.serving in self.loaded
        assert self.pointer is None or pointer.token >= self.pointer.token
        self.pointer = pointer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def pointers(registry: Registry) -> FilePointerStore:
    return FilePointerStore(registry.root)


@pytest.fixture
def publisher(registry: Registry, pointers: FilePointerStore, engine: FakeEngine) -> Publisher:
    return Publisher(registry, pointers, cast("Engine", engine))


@pytest.fixture
def versions(registry: Registry, drafters: Drafters) -> list[DrafterVersion]:
    return [accepted(registry, drafters(seed)) for seed in range(3)]


def states(registry: Registry, version: DrafterVersion) -> list[str]:
    return [entry.state for entry in registry.get(version).history]


async def promote(publisher: Publisher, version: DrafterVersion, *, force: bool = False) -> publishing.Published:
    return await publisher.promote(version, "better", who="test", force=force)


async def rollback(publisher: Publisher, to: DrafterVersion | None = None) -> publishing.Published:
    return await publisher.rollback("worse", who="test", to=to)


async def test_promoting_changes_pointer_engine_and_history(
    publisher: Publisher, engine: FakeEngine, registry: Registry, versions: list[DrafterVersion]
) -> None:
    first, second, _ = versions
    await promote(publisher, first)
    published = await promote(publisher, second)
    assert published.in_force
    assert published.detail == f"version {second.id} serves instead of {first.id}"
    assert published.pointer == engine.pointer
    assert (published.pointer.serving, published.pointer.previous, published.pointer.token) == (second, first, 3)
    assert serving_drafter(registry.root, TARGET) == (second, registry.path(second))
    assert states(registry, FLOOR) == ["candidate", "accepted", "serving", "retired"]
    assert states(registry, first) == ["candidate", "accepted", "serving", "retired"]
    assert states(registry, second) == ["candidate", "accepted", "serving"]
    last = registry.get(second).history[-1]
    assert (last.who, last.why, last.previous) == ("test", "better", first)


async def test_what_the_gate_did_not_accept_serves_only_by_force_and_is_recorded_so(
    publisher: Publisher, registry: Registry, engine: FakeEngine, drafters: Drafters
) -> None:
    version = add(registry, drafters(0))
    for verdict in ("inconclusive", "refused"):
        with pytest.raises(RegistryError, match=f"not accepted; .*: redraft drafters promote {version.id} --force"):
            await promote(publisher, version)
        registry.decide(version, verdict, who="gate", why="worse")
    with pytest.raises(RegistryError, match="is refused, not accepted"):
        await promote(publisher, version)
    assert engine.loaded == [] and registry.get(version).state == "refused"
    await promote(publisher, version, force=True)
    assert states(registry, version) == ["candidate", "inconclusive", "refused", "accepted", "serving"]
    assert [entry.forced for entry in registry.get(version).history] == [False, False, False, True, False]


async def test_what_cannot_be_loaded_never_becomes_the_pointer(
    publisher: Publisher, engine: FakeEngine, registry: Registry, versions: list[DrafterVersion]
) -> None:
    await promote(publisher, versions[0])
    for error in (RequestRefused("wrong shape"), EngineUnavailable("it went away")):
        engine.load_error = error
        with pytest.raises(RegistryError, match=f"the engine says: {error}"):
            await promote(publisher, versions[1])
    shutil.rmtree(registry.path(versions[2]))
    with pytest.raises(RegistryError, match="is not in"):
        await promote(publisher, versions[2])
    assert serving_drafter(registry.root, TARGET) == (versions[0], registry.path(versions[0]))
    assert engine.pointer and engine.pointer.serving == versions[0]
    assert [registry.get(version).state for version in versions] == ["serving", "accepted", "accepted"]


async def test_an_engine_that_hangs_is_given_up(
    publisher: Publisher, engine: FakeEngine, versions: list[DrafterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "LOAD_SECONDS", 0.01)
    engine.hangs = True
    with pytest.raises(RegistryError, match=r"the engine did not answer within 0\.01 s"):
        await promote(publisher, versions[0])


async def test_of_two_that_publish_at_once_one_does_and_the_other_says_so(
    publisher: Publisher,
    engine: FakeEngine,
    registry: Registry,
    pointers: FilePointerStore,
    versions: list[DrafterVersion],
) -> None:
    await promote(publisher, versions[0])

    def somebody_else() -> None:
        pointer = DrafterPointer(target=TARGET, serving=versions[2], previous=versions[0], token=3)
        assert pointers._compare_and_set(2, pointer)
        registry.follow(pointer, who="somebody else", why="it is best", left="retired")

    engine.while_loading = somebody_else
    said = f"{versions[1].id} was not promoted: .* {versions[2].id} serves, chosen by somebody else: it is best"
    with pytest.raises(RegistryError, match=said):
        await promote(publisher, versions[1])
    assert registry.get(versions[1]).state == "accepted"
    assert engine.pointer and engine.pointer.serving == versions[0]


async def test_who_was_overtaken_before_the_engine_turned_is_told_who_serves(
    publisher: Publisher, engine: FakeEngine, pointers: FilePointerStore, versions: list[DrafterVersion]
) -> None:
    first, second, _ = versions
    activate = engine.activate

    async def overtaken(pointer: DrafterPointer) -> None:
        engine.activate = activate  # type: ignore[method-assign]
        await publisher.promote(second, "it is best", who="somebody else")
        raise RequestRefused(f"pointer {pointer.token} is out of date")

    engine.activate = overtaken  # type: ignore[method-assign]
    published = await promote(publisher, first)
    assert not published.in_force and published.pointer == pointers.load(TARGET) == engine.pointer
    assert f"version {second.id} serves, chosen by somebody else: it is best" in published.detail
    assert "promote it again" not in published.detail


async def test_an_older_pointer_that_was_restored_is_followed_by_all_under_a_new_token(
    publisher: Publisher,
    engine: FakeEngine,
    registry: Registry,
    pointers: FilePointerStore,
    versions: list[DrafterVersion],
) -> None:
    first, second, _ = versions
    await promote(publisher, first)
    file = registry.root / TARGET / "pointer.json"
    older = file.read_bytes()
    await promote(publisher, second)
    file.write_bytes(older)
    published = await promote(publisher, first)
    assert published.in_force and engine.pointer == published.pointer == pointers.load(TARGET)
    assert (published.pointer.serving, published.pointer.token) == (first, 4)
    assert [registry.get(version).state for version in (first, second)] == ["serving", "retired"]
    assert "an older pointer was restored" in registry.get(first).history[-1].why

    file.write_bytes(older)
    shutil.rmtree(registry.root / TARGET / "records")
    engine.pointer = msgspec.structs.replace(published.pointer, token=9)
    add(registry, registry.path(second))
    assert (await promote(publisher, second, force=True)).pointer == engine.pointer
    assert engine.pointer.token == 11


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")])
async def test_a_lost_record_of_any_version_keeps_nobody_from_replacing_the_one_that_serves(
    publisher: Publisher,
    registry: Registry,
    versions: list[DrafterVersion],
    drafters: Drafters,
    damage: Callable[[Path], None],
) -> None:
    first, second, third = versions
    fourth = accepted(registry, drafters(3))
    records = registry.root / TARGET / "records"
    await promote(publisher, first)
    await promote(publisher, second)
    damage(records / f"{first.id}.json")
    damage(records / f"{second.id}.json")
    assert (await rollback(publisher)).pointer.serving == first
    published = await promote(publisher, third)
    assert published.in_force and (published.pointer.serving, published.pointer.token) == (third, 5)
    await promote(publisher, FLOOR)
    await promote(publisher, third)
    damage(records / f"{third.id}.json")
    assert (await rollback(publisher)).pointer.serving == FLOOR
    with pytest.raises(RegistryError, match="nothing served before"):
        await rollback(publisher)
    damage(records / f"{FLOOR.id}.json")
    (registry.root / TARGET / "pointer.json").unlink()
    assert (await promote(publisher, fourth)).in_force


async def test_where_the_engine_does_not_follow_the_pointer_is_the_truth_and_promoting_again_tells_it(
    publisher: Publisher, engine: FakeEngine, registry: Registry, versions: list[DrafterVersion]
) -> None:
    engine.activate_error = RequestRefused("not now")
    published = await promote(publisher, versions[0])
    assert not published.in_force
    assert "by the pointer, but the engine does not follow yet: the engine says: not now" in published.detail
    assert serving_drafter(registry.root, TARGET) == (versions[0], registry.path(versions[0]))
    engine.activate_error = None
    again = await promote(publisher, versions[0])
    assert again.in_force and again.detail == f"version {versions[0].id} serves already"
    assert engine.pointer == published.pointer == again.pointer


@pytest.mark.parametrize("there", [True, False])
async def test_where_no_engine_runs_it_takes_the_version_at_its_start(
    there: bool,
    registry: Registry,
    pointers: FilePointerStore,
    engine: FakeEngine,
    versions: list[DrafterVersion],
) -> None:
    engine.ready = False
    publisher = Publisher(registry, pointers, cast("Engine", engine) if there else None)
    published = await promote(publisher, versions[0])
    assert not published.in_force
    why = "still loading: promote it again once it is up" if there else "no engine is running: it takes this version"
    assert why in published.detail
    assert serving_drafter(registry.root, TARGET) == (versions[0], registry.path(versions[0]))
    assert engine.loaded == []


async def test_rolling_back_twice_goes_further_back_and_then_says_that_there_is_nothing(
    publisher: Publisher, engine: FakeEngine, registry: Registry, versions: list[DrafterVersion]
) -> None:
    first, second, _ = versions
    await promote(publisher, first)
    await promote(publisher, second)
    once = await rollback(publisher)
    assert once.detail == f"version {first.id} serves again instead of {second.id}"
    assert (once.pointer.serving, once.pointer.previous) == (first, FLOOR)
    assert states(registry, second)[-1] == "rolled_back"
    assert registry.get(second).history[-1].why == f"version {second.id} was rolled back: worse"
    twice = await rollback(publisher)
    assert (twice.pointer.serving, twice.pointer.previous) == (FLOOR, None)
    assert engine.pointer == twice.pointer
    assert serving_drafter(registry.root, TARGET) is None
    with pytest.raises(RegistryError, match=f"nothing served before {FLOOR.id}"):
        await rollback(publisher)


async def test_what_was_rolled_back_comes_back_only_by_force(
    publisher: Publisher, versions: list[DrafterVersion]
) -> None:
    first, second, _ = versions
    await promote(publisher, first)
    await promote(publisher, second)
    await rollback(publisher)
    with pytest.raises(RegistryError, match="is rolled_back, not accepted"):
        await promote(publisher, second)
    said = f"is rolled_back; a rollback goes .* promote {second.id} --force; or roll back with --to {FLOOR.id}$"
    with pytest.raises(RegistryError, match=said):
        await rollback(publisher, second)
    assert (await promote(publisher, second, force=True)).pointer.serving == second


async def test_a_rollback_goes_to_a_named_version_that_served(
    publisher: Publisher, versions: list[DrafterVersion]
) -> None:
    first, second, third = versions
    await promote(publisher, first)
    await promote(publisher, second)
    with pytest.raises(RegistryError, match=f"is accepted; a rollback goes to .* promote {third.id}; or roll back"):
        await rollback(publisher, third)
    with pytest.raises(RegistryError, match="serves already; nothing was rolled back"):
        await rollback(publisher, second)
    await promote(publisher, third)
    assert (await rollback(publisher, first)).pointer.serving == first


async def test_unknown_versions_and_an_untouched_registry_change_nothing(
    publisher: Publisher, pointers: FilePointerStore
) -> None:
    with pytest.raises(UnknownVersion):
        await promote(publisher, DrafterVersion("dflash", "nowhere"))
    assert await pointers.read(TARGET) is None
    with pytest.raises(RegistryError, match="nothing served before"):
        await rollback(publisher)


async def test_a_pointer_that_was_moved_away_is_begun_again_above_its_last_token(
    publisher: Publisher, engine: FakeEngine, registry: Registry, versions: list[DrafterVersion]
) -> None:
    await promote(publisher, versions[0])
    (registry.root / TARGET / "pointer.json").unlink()
    published = await promote(publisher, versions[1])
    assert published.in_force and published.pointer.token == 4
    assert published.pointer.previous == FLOOR
    assert [registry.get(version).state for version in versions] == ["retired", "serving", "accepted"]


def test_a_publisher_killed_anywhere_leaves_a_version_that_can_serve_and_a_next_that_tidies(
    registry: Registry, pointers: FilePointerStore, drafters: Drafters
) -> None:
    versions = [accepted(registry, drafters(seed)) for seed in range(2)]
    before = shutil.copytree(registry.root, registry.root.with_name("before"))

    def prepare() -> Callable[[], None]:
        shutil.rmtree(registry.root)
        shutil.copytree(before, registry.root)
        publisher = Publisher(registry, pointers, None)

        def publish() -> None:
            asyncio.run(promote(publisher, versions[0]))
            asyncio.run(rollback(publisher))

        return publish

    def check() -> None:
        serving_drafter(registry.root, TARGET)
        publisher = Publisher(registry, pointers, None)
        asyncio.run(promote(publisher, versions[1], force=True))
        serving = [entered.version for entered in registry.all() if entered.state == "serving"]
        pointer = pointers.load(TARGET)
        assert pointer and serving == [pointer.serving] == [versions[1]]

    assert killed_everywhere(prepare, check) > 20


async def test_what_was_judged_against_one_version_does_not_take_the_place_of_another(
    publisher: Publisher, versions: list[DrafterVersion], pointers: FilePointerStore
) -> None:
    first, second, third = versions
    await promote(publisher, first)
    await promote(publisher, second)
    with pytest.raises(RegistryError, match=f"judged against {first.id}, but {second.id} serves"):
        await publisher.promote(third, "better", who="gate", instead_of=first)
    pointer = pointers.load(TARGET)
    assert pointer is not None
    assert pointer.serving == second
    again = await publisher.promote(second, "better", who="gate", instead_of=first)
    assert again.detail == f"version {second.id} serves already"
    assert (await publisher.promote(third, "better", who="gate", instead_of=second)).pointer.serving == third

"""Versions are what was added, whole, for ever; their histories only grow; what cannot be is refused in words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from redraft.engine.checkpoints.models import KNOWN_MODELS, MergedModel
from redraft.engine.drafters.loading import bundled, content_id
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.types import FLOOR, AcceptLength, DrafterPointer, DrafterVersion, Stratum
from redraft.feedback.drift.reference import Reference
from redraft.retrain.registry.errors import RegistryError, UnknownVersion
from redraft.retrain.registry.record import GateResult, Verdict
from redraft.retrain.registry.registry import Registry, add_version_zero, open_registry

from .conftest import TARGET, Drafters, accepted, add, in_child, killed_everywhere, record_of

pytestmark = pytest.mark.unit


def reference(sessions: int) -> Reference:
    """What a gate predicts of a stratum."""
    return Reference(
        stratum=Stratum("default", "coder", 1024, "greedy", constrained=False),
        drafter=FLOOR,
        reached=(10, 5),
        accepted=(5, 1),
        sessions=sessions,
        variance=1.0,
        skewness=0.0,
        kurtosis=3.0,
    )


def serve(registry: Registry, version: DrafterVersion, token: int, previous: DrafterVersion | None = None) -> None:
    pointer = DrafterPointer(target=TARGET, serving=version, previous=previous, token=token)
    registry.follow(pointer, who="test", why="test", left="retired")


def test_a_version_is_a_read_only_copy_of_what_was_added(registry: Registry, drafters: Drafters) -> None:
    folder = drafters(0)
    version = add(registry, folder, why="drift in tools", references=(reference(1),))
    copy = registry.path(version)
    assert content_id(copy) == version.id == content_id(folder)
    assert {file.name for file in copy.iterdir()} == {file.name for file in folder.iterdir()}
    assert {file.stat().st_mode & 0o777 for file in copy.iterdir()} == {0o400}
    entered = registry.get(version)
    assert (entered.state, entered.record.why) == ("candidate", "drift in tools")
    assert entered.references == (reference(1),)
    shutil.rmtree(folder)
    assert registry.path(version) == copy


def test_a_registry_is_its_owners_alone(registry: Registry, drafters: Drafters) -> None:
    accepted(registry, drafters(0))
    modes = {path.stat().st_mode & 0o777 for path in (registry.root, *registry.root.rglob("*")) if path.is_dir()}
    assert modes == {0o700}
    modes = {path.stat().st_mode & 0o777 for path in registry.root.rglob("*") if path.is_file()}
    assert modes == {0o400, 0o600}


def test_adding_twice_is_the_same_version_with_its_first_record(registry: Registry, drafters: Drafters) -> None:
    folder = drafters(0)
    first = accepted(registry, folder, why="first")
    assert add(registry, folder, why="second") == first
    assert [(entered.version, entered.record.why, entered.state) for entered in registry.all()] == [
        (first, "first", "accepted")
    ]


def test_what_does_not_hold_the_version_that_it_is_said_to_is_not_added(
    registry: Registry, drafters: Drafters, tmp_path: Path
) -> None:
    one, other = drafters(0), drafters(1)
    with pytest.raises(RegistryError, match=f"holds the version {content_id(other)}, not {content_id(one)}"):
        registry.add(other, record_of(one), who="test")
    with pytest.raises(RegistryError, match="drafts for the target bbbbbbbbbbbb; these are of 7a7a7a7a7a7a"):
        registry.add(one, record_of(one, target="b" * 64), who="test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RegistryError, match=rf"{tmp_path}/empty is no drafter checkpoint: config\.json"):
        registry.add(tmp_path / "empty", record_of(one), who="test")
    assert registry.all() == []
    assert add(registry, one).id == content_id(one)


def damage_config(folder: Path) -> None:
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text("{}")


def add_weights(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(b"")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def make_pipe(folder: Path) -> None:
    os.mkfifo(folder / "more.safetensors")


def put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def put_link(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.parent.parent / "elsewhere"))


def put_dangling_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_config, "has changed since it was added"),
        (add_weights, "has changed since it was added"),
        (remove_weights, "has changed since it was added"),
        (lambda folder: (folder / "config.json").unlink(), r"is damaged: .*config\.json: No such file"),
        (shutil.rmtree, "is not in .*: its weights are missing"),
        (make_pipe, r"is damaged: .*more\.safetensors is no plain file"),
        (put_file, "is a file or a link where version"),
        (put_link, "is a file or a link where version"),
        (put_dangling_link, "is a file or a link where version"),
    ],
)
def test_files_that_changed_are_an_error_and_can_be_added_again(
    registry: Registry, drafters: Drafters, damage: Callable[[Path], None], words: str
) -> None:
    folder = drafters(0)
    version = add(registry, folder)
    damage(registry.path(version))
    with pytest.raises(RegistryError, match=rf"{words}(.|\n)*redraft drafters add FOLDER"):
        registry.path(version)
    add(registry, folder)
    assert content_id(registry.path(version)) == version.id
    nothing_left_behind(registry)


def record_file(registry: Registry, version: DrafterVersion) -> Path:
    return registry.root / TARGET / "records" / f"{version.id}.json"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def empty_history(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "history": []}))


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_anothers(file: Path) -> None:
    file.write_text(file.read_text().replace(file.stem, "0123456789abcdef"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "is damaged"),
        (empty_history, "has no history"),
        (make_folder, "is no plain file"),
        (make_anothers, "is not that version's"),
    ],
)
def test_a_damaged_record_is_named_and_passed_over(
    registry: Registry, drafters: Drafters, damage: Callable[[Path], None], words: str
) -> None:
    whole, version = add(registry, drafters(0)), add(registry, drafters(1))
    child = add(registry, drafters(2), parent=version)
    damage(record_file(registry, version))
    assert {entered.version for entered in registry.all()} == {whole, child}
    assert [entered.version for entered in registry.lineage(child)] == [child]
    said = registry.damaged()
    assert (
        list(said) == [version.id]
        and words in said[version.id]
        and str(record_file(registry, version)) in said[version.id]
    )
    assert f"redraft drafters add {registry.path(version)}" in said[version.id]
    with pytest.raises(RegistryError, match=words):
        registry.get(version)


def test_a_version_whose_record_was_moved_away_is_entered_anew_from_its_weights(
    registry: Registry, drafters: Drafters
) -> None:
    version = accepted(registry, drafters(0))
    record_file(registry, version).unlink()
    assert registry.damaged() == {}
    assert "json is missing; restore it, or enter the version anew" in registry.damaged(version)[version.id]
    assert add(registry, registry.path(version)) == version
    assert registry.damaged(version) == {} and registry.get(version).state == "candidate"


def test_version_zero_with_a_damaged_record_does_not_close_the_registry(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, TARGET)
    cut(record_file(registry, FLOOR))
    assert open_registry(tmp_path, TARGET).all() == []
    assert add_version_zero(registry) == FLOOR


@pytest.mark.parametrize("verdict", ["accepted", "refused", "inconclusive"])
def test_a_gate_decides_a_candidate_and_its_numbers_are_kept(
    registry: Registry, drafters: Drafters, verdict: Verdict
) -> None:
    version = add(registry, drafters(0), references=(reference(1),))
    gate = GateResult(report="report.json", accept_length=AcceptLength(30, 10), references=(reference(2),))
    registry.decide(version, verdict, who="gate", why="because", gate=gate)
    entered = registry.get(version)
    assert [entry.state for entry in entered.history] == ["candidate", verdict]
    assert entered.gate and (entered.gate.accept_length.tau, entered.gate.report) == (3.0, "report.json")
    assert entered.references == (reference(2),)


def test_only_what_is_undecided_can_be_decided(registry: Registry, drafters: Drafters) -> None:
    version = add(registry, drafters(0))
    registry.decide(version, "inconclusive", who="gate", why="thin")
    registry.decide(version, "refused", who="gate", why="worse")
    with pytest.raises(RegistryError, match="is refused; it cannot become accepted"):
        registry.decide(version, "accepted", who="gate", why="better")
    registry.force(version, who="somebody", why="I know better")
    with pytest.raises(RegistryError, match="is accepted; it cannot become refused"):
        registry.decide(version, "refused", who="gate", why="worse")
    assert [(entry.state, entry.forced) for entry in registry.get(version).history][-1] == ("accepted", True)
    serve(registry, version, 1)
    with pytest.raises(RegistryError, match="serves; there is nothing to force"):
        registry.force(version, who="somebody", why="again")


def test_history_follows_pointers_in_their_order_only(registry: Registry, drafters: Drafters) -> None:
    first, second = (accepted(registry, drafters(seed)) for seed in range(2))
    serve(registry, first, 1)
    serve(registry, second, 3, first)
    serve(registry, first, 2)
    serve(registry, second, 3, first)
    assert [entry.state for entry in registry.get(first).history] == ["candidate", "accepted", "serving", "retired"]
    assert [entry.state for entry in registry.get(second).history] == ["candidate", "accepted", "serving"]
    assert registry.get(second).replaced == first


def test_lineage_leads_back_to_version_zero(registry: Registry, drafters: Drafters) -> None:
    zero = open_registry(registry.root, TARGET).all()[0].version
    parent = add(registry, drafters(0), parent=zero)
    child = add(registry, drafters(1), parent=parent)
    assert [entered.version for entered in registry.lineage(child)] == [child, parent, zero]


def test_version_zero_is_the_floor_where_nothing_is_bundled(tmp_path: Path) -> None:
    assert NgramDrafter.version == FLOOR
    versions = open_registry(tmp_path, TARGET).all()
    assert [(entered.version, entered.record.origin, entered.state) for entered in versions] == [
        (FLOOR, "bundled", "accepted")
    ]
    assert open_registry(tmp_path, TARGET).all() == versions


def test_version_zero_is_the_bundled_drafter_by_its_content(tmp_path: Path) -> None:
    known = KNOWN_MODELS["smollm2-135m-agent"]
    assert isinstance(known, MergedModel)
    source = bundled(known.identity)
    assert source
    registry = open_registry(tmp_path, known.identity)
    (entered,) = registry.all()
    assert entered.version == DrafterVersion("dflash", content_id(source))
    assert registry.path(entered.version).is_relative_to(tmp_path)


def test_a_version_is_found_by_a_beginning_that_no_other_has(registry: Registry, drafters: Drafters) -> None:
    versions = [add(registry, drafters(seed)) for seed in range(17)]
    ids = [version.id for version in versions]
    for version in versions:
        assert registry.find(version.id).version == version
    shared = next(id[0] for id in ids if sum(other[0] == id[0] for other in ids) > 1)
    with pytest.raises(UnknownVersion, match=f"{shared!r} is the beginning of .* and of .*; type more of it"):
        registry.find(shared)
    wrong = ids[0][:-1] + ("0" if ids[0][-1] != "0" else "1")
    with pytest.raises(UnknownVersion, match=f"did you mean {ids[0]}"):
        registry.find(wrong)
    with pytest.raises(UnknownVersion, match="there are: "):
        registry.find("")


def test_pruning_drops_weights_of_old_refusals_only(registry: Registry, drafters: Drafters) -> None:
    folders = [drafters(seed) for seed in range(6)]
    versions = [add(registry, folder) for folder in folders]
    for version in versions[:2]:
        registry.decide(version, "accepted", who="gate", why="better")
    serve(registry, versions[0], 1)
    serve(registry, versions[1], 2, versions[0])
    registry.decide(versions[3], "refused", who="gate", why="worse")
    registry.decide(versions[4], "inconclusive", who="gate", why="thin")
    registry.decide(versions[5], "refused", who="gate", why="worse")
    assert registry.prune(keep=1) == [versions[4], versions[3]]
    assert registry.prune(keep=1) == []
    for version in (*versions[:3], versions[5]):
        registry.path(version)
    with pytest.raises(RegistryError, match="its weights were dropped, as those of refused versions are"):
        registry.path(versions[3])
    assert len(registry.all()) == 6
    add(registry, folders[3])
    assert registry.path(versions[3]) and registry.get(versions[3]).state == "refused"


def whole(registry: Registry) -> None:
    """Everything a reader can see is whole."""
    for entered in Registry(registry.root, TARGET).all():
        if entered.state not in ("refused", "inconclusive"):
            registry.path(entered.version)


def nothing_left_behind(registry: Registry) -> None:
    assert list(registry.root.rglob(".*")) == []
    names = {entered.version.id for entered in registry.all()}
    assert {folder.name for folder in (registry.root / TARGET / "weights").iterdir()} <= names


def test_a_writer_killed_anywhere_leaves_nothing_or_the_whole(registry: Registry, drafters: Drafters) -> None:
    folder = drafters(0)

    def prepare() -> Callable[[], None]:
        shutil.rmtree(registry.root, ignore_errors=True)
        return lambda: void(accepted(registry, folder))

    def check() -> None:
        whole(registry)
        version = add(registry, folder)
        if registry.get(version).state == "candidate":
            registry.decide(version, "accepted", who="gate", why="better")
        whole(registry)
        nothing_left_behind(registry)

    assert killed_everywhere(prepare, check) > 20


def test_pruning_killed_anywhere_is_finished_by_the_next(registry: Registry, drafters: Drafters) -> None:
    folders = [drafters(seed) for seed in range(3)]

    def prepare() -> Callable[[], None]:
        shutil.rmtree(registry.root, ignore_errors=True)
        for folder in folders:
            registry.decide(add(registry, folder), "refused", who="gate", why="worse")
        return lambda: void(registry.prune(keep=1))

    def check() -> None:
        registry.prune(keep=1)
        nothing_left_behind(registry)
        assert len(list((registry.root / TARGET / "weights").iterdir())) == 1
        assert len(registry.all()) == 3

    assert killed_everywhere(prepare, check) > 10


def test_a_reader_sees_only_whole_versions_between_any_two_steps_of_a_writer(
    registry: Registry, drafters: Drafters
) -> None:
    first, second = drafters(0), drafters(1)
    add(registry, first)
    looks = registry.root / "looks"

    def write() -> None:
        accepted(registry, second)
        registry.prune(keep=0)

    def look(_: int) -> None:
        whole(registry)
        with looks.open("a") as stream:
            stream.write(f"{len(registry.all())}\n")

    assert in_child(write, look) == 0
    seen = [int(line) for line in looks.read_text().split()]
    assert seen == sorted(seen) and set(seen) == {1, 2}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_full_or_forbidden_disk_leaves_what_was_there(
    registry: Registry, drafters: Drafters, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    kept = add(registry, drafters(0))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match=error.strerror):
            add(registry, drafters(1))
    assert [entered.version for entered in registry.all()] == [kept]
    nothing_left_behind(registry)


def test_writers_at_the_same_time_lose_nothing(registry: Registry, drafters: Drafters) -> None:
    folders = [drafters(seed) for seed in range(4)]
    children = []
    for writer in range(4):
        child = os.fork()
        if not child:
            status = 1
            try:
                for index in range(8):
                    add(registry, folders[(writer + index) % 4])
                version = add(registry, folders[writer])
                for _ in range(5):
                    registry.decide(version, "inconclusive", who=str(writer), why="thin")
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert len(registry.all()) == 4
    assert [len(entered.history) for entered in registry.all()] == [6] * 4
    whole(registry)
    nothing_left_behind(registry)


def void(_: object) -> None: ...

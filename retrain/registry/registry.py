"""Drafter versions of one target, in a folder.

    <root>/<target>/records/<id>.json   facts and history, replaced whole
    <root>/<target>/weights/<id>/       the checkpoint, read-only, known by its content
    <root>/<target>/lock                held by whoever writes

A version is there when its record is; what a writer that was stopped left besides is swept away by the next one. All
of it is its owner's alone, as the traffic is that it was learnt from.
"""

from __future__ import annotations

import difflib
import os
import shutil
import time
from pathlib import Path
from typing import Literal

import msgspec

from redraft.engine.types import FLOOR, DrafterPointer, DrafterVersion
from redraft.retrain.files import locked, private_folder, replace, sync
from redraft.retrain.registry.errors import RegistryError, UnknownVersion
from redraft.retrain.registry.record import Entered, Entry, GateResult, Verdict, VersionRecord

KEPT = (".json", ".safetensors", ".md")
"""Suffixes of a checkpoint's files."""

MEND = "Add the same checkpoint again (redraft drafters add FOLDER), or promote another version"

_PARTIAL = ".partial-"


class Registry:
    """The versions of one ``target`` (its identity hash) under ``root``; making one touches nothing.

    Readers need no lock and see a version whole or not at all. Raises `RegistryError` for whatever cannot be done.
    """

    def __init__(self, root: Path, target: str) -> None:
        self.root = root
        self.target = target
        self._folder = root / target
        self._records = self._folder / "records"
        self._weights = self._folder / "weights"
        self._lock = self._folder / "lock"

    def add(self, folder: Path | None, record: VersionRecord, *, who: str) -> DrafterVersion:
        """Copy a checkpoint in as a candidate; a version that is there already stays as it is, but damage is mended.

        ``folder`` is None for the floor alone.
        """
        version = record.version
        if record.target != self.target:
            raise RegistryError(
                f"version {version.id} drafts for the target {record.target[:12]}; these are of {self.target[:12]}"
            )
        with locked(self._lock):
            self._sweep()
            if folder is not None:
                try:
                    self.path(version)
                except RegistryError:
                    self._copy(folder, version)
            if not self._file(version.id).exists():
                first = Entry(state="candidate", time=time.time(), who=who, why=record.why)
                self._write(Entered(record, (first,)))
        return version

    def all(self) -> list[Entered]:
        """Every version whose record is whole, oldest first."""
        found = filter(None, map(self._whole, self._records.glob("*.json")))
        return sorted(found, key=lambda entered: (entered.record.created, entered.version.id))

    def damaged(self, *needed: DrafterVersion) -> dict[str, str]:
        """What is wrong with the records that `all` passes over, and with any that is missing of those ``needed``.

        By version id, with what to do about it.
        """
        damage = {}
        for version in needed:
            if not self._file(version.id).exists():
                mend = self._anew(", or", version.id) or ", or promote another version"
                damage[version.id] = f"{self._file(version.id)} is missing; restore it{mend}"
        for file in sorted(self._records.glob("*.json")):
            try:
                self._read(file)
            except RegistryError as error:
                damage[file.stem] = str(error)
        return damage

    def get(self, version: DrafterVersion) -> Entered:
        return self._read(self._file(version.id))

    def known(self, version: DrafterVersion) -> Entered | None:
        """As `get`, but None where the record is missing or damaged."""
        return self._whole(self._file(version.id))

    @property
    def token(self) -> int:
        """Of the newest pointer that whole histories tell of; 0 before there was any."""
        return max((entry.token for entered in self.all() for entry in entered.history), default=0)

    def find(self, prefix: str) -> Entered:
        """The one version whose id begins so; raises `UnknownVersion` naming those that come near."""
        ids = sorted(file.stem for file in self._records.glob("*.json"))
        found = [name for name in ids if name.startswith(prefix)] if prefix else []
        if len(found) == 1:
            return self._read(self._file(found[0]))
        if found:
            raise UnknownVersion(f"{prefix!r} is the beginning of {' and of '.join(found)}; type more of it")
        near = difflib.get_close_matches(prefix, ids, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(ids) or 'none yet'}"
        raise UnknownVersion(f"no drafter version {prefix!r} of the target {self.target[:12]}; {hint}")

    def path(self, version: DrafterVersion) -> Path:
        """The folder of a version's checkpoint, found to be what was added."""
        from redraft.engine.drafters.checkpoint import DrafterError
        from redraft.engine.drafters.loading import content_id

        folder = self._weights / version.id
        if not os.path.lexists(folder):
            entered = self.known(version)
            if entered and entered.state in ("refused", "inconclusive"):
                why = f"its weights were dropped, as those of {entered.state} versions are; its record is kept"
            else:
                why = "its weights are missing"
            raise RegistryError(f"version {version.id} is not in {self._weights}: {why}. {MEND}")
        if folder.is_symlink() or not folder.is_dir():
            raise RegistryError(f"{folder} is a file or a link where version {version.id} should be. {MEND}")
        try:
            content = content_id(folder)
        except DrafterError as error:
            raise RegistryError(f"version {version.id} is damaged: {error} {MEND}") from error
        if content != version.id:
            raise RegistryError(f"{folder} has changed since it was added: its content is {content}. {MEND}")
        return folder

    def lineage(self, version: DrafterVersion) -> list[Entered]:
        """The version, its parent, and so on back to one that has none, or none whose record is whole."""
        line = [self.get(version)]
        while (parent := line[-1].record.parent) and (entered := self.known(parent)):
            line.append(entered)
        return line

    def decide(
        self, version: DrafterVersion, verdict: Verdict, *, who: str, why: str, gate: GateResult | None = None
    ) -> Entered:
        """Record a gate's verdict of a candidate, or of one that was inconclusive."""
        with locked(self._lock):
            entered = self.get(version)
            if entered.state not in ("candidate", "inconclusive"):
                raise RegistryError(f"version {version.id} is {entered.state}; it cannot become {verdict}")
            return self._enter(entered, Entry(state=verdict, time=time.time(), who=who, why=why, gate=gate))

    def force(self, version: DrafterVersion, *, who: str, why: str) -> Entered:
        """Record that a person accepts a version whatever the gate said."""
        with locked(self._lock):
            entered = self.get(version)
            if entered.state == "serving":
                raise RegistryError(f"version {version.id} serves; there is nothing to force")
            return self._enter(entered, Entry(state="accepted", time=time.time(), who=who, why=why, forced=True))

    def follow(self, pointer: DrafterPointer, *, who: str, why: str, left: Literal["retired", "rolled_back"]) -> None:
        """Record who serves by a pointer newer than any recorded, and what becomes of those that did.

        A version whose record is missing or damaged is passed over.
        """
        with locked(self._lock):
            if pointer.token <= self.token:
                return
            now = time.time()
            for entered in self.all():
                if entered.state == "serving" and entered.version != pointer.serving:
                    self._enter(entered, Entry(state=left, time=now, who=who, why=why))
            if serving := self.known(pointer.serving):
                entry = Entry(
                    state="serving", time=now, who=who, why=why, previous=pointer.previous, token=pointer.token
                )
                self._enter(serving, entry)

    def prune(self, keep: int) -> list[DrafterVersion]:
        """Drop the weights of all but the last ``keep`` versions that were refused or stayed inconclusive."""
        with locked(self._lock):
            self._sweep()
            spent = [entered for entered in self.all() if entered.state in ("refused", "inconclusive")]
            spent.sort(key=lambda entered: entered.history[-1].time, reverse=True)
            dropped = [entered.version for entered in spent[keep:] if (self._weights / entered.version.id).exists()]
            for version in dropped:
                self._discard(version)
            self._sweep()
        return dropped

    def _copy(self, folder: Path, version: DrafterVersion) -> None:
        from redraft.engine.drafters.checkpoint import DrafterError
        from redraft.engine.drafters.loading import content_id

        partial = self._weights / f"{_PARTIAL}{version.id}"
        private_folder(partial)
        try:
            for file in sorted(folder.iterdir()):
                if file.suffix in KEPT and file.is_file():
                    copy = Path(shutil.copyfile(file, partial / file.name))
                    sync(copy)
                    copy.chmod(0o400)
            if (content := content_id(partial)) != version.id:
                raise RegistryError(f"{folder} holds the version {content}, not {version.id}; it was not added")
            sync(partial)
            self._discard(version)
            partial.rename(self._weights / version.id)
        except DrafterError as error:
            raise RegistryError(str(error).replace(str(partial), str(folder))) from error
        finally:
            self._sweep()
        sync(self._weights)

    def _discard(self, version: DrafterVersion) -> None:
        """Take weights away in one step; a sweep removes them."""
        weights = self._weights / version.id
        if os.path.lexists(weights):
            weights.rename(self._weights / f"{_PARTIAL}{version.id}-discarded")

    def _sweep(self) -> None:
        for left in self._weights.glob(f"{_PARTIAL}*"):
            if left.is_symlink() or not left.is_dir():
                left.unlink()
            else:
                shutil.rmtree(left)

    def _file(self, version_id: str) -> Path:
        return self._records / f"{version_id}.json"

    def _read(self, file: Path) -> Entered:
        mend = f"restore it, or move it away{self._anew(' and', file.stem)}"
        if file.exists() and not file.is_file():
            raise RegistryError(f"{file} is no plain file; {mend}")
        try:
            entered = msgspec.json.decode(file.read_bytes(), type=Entered)
        except FileNotFoundError:
            raise UnknownVersion(f"no drafter version {file.stem} of the target {self.target[:12]}") from None
        except OSError as error:
            raise RegistryError(f"{file} cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise RegistryError(f"{file} is damaged ({error}); {mend}") from error
        if not entered.history or (entered.version.id, entered.record.target) != (file.stem, self.target):
            raise RegistryError(f"{file} is damaged (it is not that version's, or has no history); {mend}")
        return entered

    def _anew(self, before: str, version_id: str) -> str:
        """How a version without a record is had again, after ``before``, where its weights are there."""
        weights = self._weights / version_id
        return f"{before} enter the version anew: redraft drafters add {weights}" if weights.is_dir() else ""

    def _whole(self, file: Path) -> Entered | None:
        try:
            return self._read(file)
        except RegistryError:
            return None

    def _enter(self, entered: Entered, entry: Entry) -> Entered:
        changed = Entered(entered.record, (*entered.history, entry))
        self._write(changed)
        return changed

    def _write(self, entered: Entered) -> None:
        replace(self._file(entered.version.id), msgspec.json.format(msgspec.json.encode(entered)) + b"\n")


def open_registry(root: Path, target: str) -> Registry:
    """The registry of a target, with version zero in it: the bundled drafter, or the floor where none is bundled."""
    registry = Registry(root, target)
    if not registry.all() and not registry.damaged():
        add_version_zero(registry)
    return registry


def add_version_zero(registry: Registry) -> DrafterVersion:
    from redraft.engine.drafters.loading import bundled, version_of

    folder = bundled(registry.target)
    version = version_of(folder) if folder else FLOOR
    why = "comes with Redraft"
    registry.add(
        folder, VersionRecord(version=version, target=registry.target, origin="bundled", why=why), who="redraft"
    )
    entered = registry.known(version)
    if entered and entered.state == "candidate":
        registry.decide(version, "accepted", who="redraft", why=why)
    return version

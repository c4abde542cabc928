"""Drafters by name: the floor, those bundled for a known target, and checkpoints in folders."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig, read_json
from redraft.engine.checkpoints.models import local_folder
from redraft.engine.drafters import dflash_checkpoint, eagle3_checkpoint, mtp_checkpoint
from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.checkpoint import DrafterConfig, DrafterError
from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.drafters.eagle3 import Eagle3Drafter
from redraft.engine.drafters.mtp import MtpDrafter
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.model import Target
from redraft.engine.types import DrafterVersion

logger = logging.getLogger(__name__)


class Format(Protocol):
    """What the module of a checkpoint format offers."""

    ARCHITECTURE: str

    def load_config(self, folder: Path) -> DrafterConfig: ...

    def load(self, folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]: ...

    def check(self, folder: Path, target: ModelConfig, identity: str, context_length: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of trained drafter: its checkpoints, and what loads one beside a target."""

    format: Format
    drafter: Callable[[Path, DrafterVersion, Target, str, int, int | None], Drafter]


KINDS = {
    "dflash": Kind(dflash_checkpoint, DFlashDrafter),
    "eagle3": Kind(eagle3_checkpoint, Eagle3Drafter),
    "mtp": Kind(mtp_checkpoint, MtpDrafter),
}
"""By the name that ``engine.drafter`` and drafter versions give them."""


def load_drafter(
    name: str, target: Target, identity: str, slots: int, context_length: int | None = None
) -> Drafter | None:
    """The drafter that ``engine.drafter`` names, with draft K/V for ``slots`` tokens; None for ``none``.

    Raises `DrafterError` if a folder holds no drafter of this target.
    """
    if name == "none":
        return None
    folder = find(name, identity)
    if folder is None:
        if name in KINDS:
            logger.warning(
                "no %s drafter is bundled for target %s; n-gram serves until one is trained", name, identity[:12]
            )
        return NgramDrafter()
    return load_folder(folder, version_of(folder), target, identity, slots, context_length)


def load_version(
    version: DrafterVersion, folder: Path, target: Target, identity: str, slots: int, context_length: int | None = None
) -> Drafter:
    """The drafter of that version, which must be what ``folder`` holds; raises `DrafterError`."""
    if version == NgramDrafter.version:
        return NgramDrafter()
    kind = _kind(version)
    found = content_id(folder)
    if found != version.id:
        raise DrafterError(f"{folder} holds drafter {found}, not {version.id}; it was changed, or is another's folder.")
    return kind.drafter(folder, version, target, identity, slots, context_length)


def load_folder(
    folder: Path, version: DrafterVersion, target: Target, identity: str, slots: int, context_length: int | None = None
) -> Drafter:
    """The drafter in a folder, to be known as ``version``; raises `DrafterError`."""
    return _kind(version).drafter(folder, version, target, identity, slots, context_length)


def _kind(version: DrafterVersion) -> Kind:
    if version.kind not in KINDS:
        raise DrafterError(
            f"drafter {version.id} is of kind {version.kind}; this engine serves {', '.join(KINDS)} and ngram."
        )
    return KINDS[version.kind]


def find(name: str, identity: str) -> Path | None:
    """The checkpoint folder that ``engine.drafter`` names; None where it needs none or none is bundled.

    Raises `DrafterError` for a name that means nothing.
    """
    if name in ("none", "ngram"):
        return None
    folder = bundled(identity, name) if name in KINDS else local_folder(name)
    if folder is None and name not in KINDS:
        raise DrafterError(f"engine.drafter {name!r} is neither none, ngram, {', '.join(KINDS)} nor a folder.")
    return folder


def bundled(identity: str, kind: str = "dflash") -> Path | None:
    """The folder of the drafter of a kind that comes with Redraft for one target."""
    root = Path(str(files("redraft.engine.drafters"))) / "bundled"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return next((each for each in folders if kind_of(each) == kind and load_config(each).target == identity), None)


def kind_of(folder: Path) -> str:
    """The kind of drafter in a folder; raises `DrafterError` if it is none of `KINDS`."""
    file = folder / "config.json"
    architectures = read_json(file).get("architectures")
    for name, kind in KINDS.items():
        if architectures == [kind.format.ARCHITECTURE]:
            return name
    known = ", ".join(kind.format.ARCHITECTURE for kind in KINDS.values())
    raise DrafterError(f"{file}: architectures {architectures!r} is none of {known}.")


def load_config(folder: Path) -> DrafterConfig:
    """What decides the arithmetic of the drafter in a folder; raises `DrafterError`."""
    return KINDS[kind_of(folder)].format.load_config(folder)


def load(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and tensors of the drafter in a folder, checked against each other; raises `DrafterError`."""
    return KINDS[kind_of(folder)].format.load(folder)


def check(folder: Path, target: ModelConfig, identity: str, context_length: int | None = None) -> None:
    """Raises `DrafterError` for what configuration and the headers of the weights tell without reading these.

    ``context_length`` is what will be served of the target's context; None is all of it.
    """
    KINDS[kind_of(folder)].format.check(folder, target, identity, context_length)


def version_of(folder: Path) -> DrafterVersion:
    """Kind and id of the drafter in a folder; raises `DrafterError`."""
    content = content_id(folder)
    return DrafterVersion(kind_of(folder), content)


def content_id(folder: Path) -> str:
    """An id that only these weights and this configuration have: 16 hex digits of a SHA-256 over the files."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if file.exists() and not file.is_file():
            raise DrafterError(f"{folder} is no drafter checkpoint: {file.name} is no plain file.")
        try:
            with file.open("rb") as stream:
                digest.update(file.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DrafterError(f"{folder} is no drafter checkpoint: {file.name}: {error.strerror}.") from error
    return digest.hexdigest()[:16]

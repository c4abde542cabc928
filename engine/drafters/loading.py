"""Drafters by name: the floor, those bundled for a known target, and checkpoints in folders."""

from __future__ import annotations

import hashlib
import logging
from importlib.resources import files
from pathlib import Path

from redraft.engine.checkpoints.models import local_folder
from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.checkpoint import DrafterError
from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.drafters.dflash_checkpoint import load_config
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.model import Target
from redraft.engine.types import DrafterVersion

logger = logging.getLogger(__name__)

BUNDLED = "dflash"


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
        if name == BUNDLED:
            logger.warning("no drafter is bundled for target %s; n-gram serves until one is trained", identity[:12])
        return NgramDrafter()
    return DFlashDrafter(folder, DrafterVersion("dflash", content_id(folder)), target, identity, slots, context_length)


def load_version(
    version: DrafterVersion, folder: Path, target: Target, identity: str, slots: int, context_length: int | None = None
) -> Drafter:
    """The drafter of that version, which must be what ``folder`` holds; raises `DrafterError`."""
    if version == NgramDrafter.version:
        return NgramDrafter()
    if version.kind != "dflash":
        raise DrafterError(f"drafter {version.id} is of kind {version.kind}; this engine serves dflash and ngram.")
    found = content_id(folder)
    if found != version.id:
        raise DrafterError(f"{folder} holds drafter {found}, not {version.id}; it was changed, or is another's folder.")
    return DFlashDrafter(folder, version, target, identity, slots, context_length)


def find(name: str, identity: str) -> Path | None:
    """The checkpoint folder that ``engine.drafter`` names; None where it needs none or none is bundled.

    Raises `DrafterError` for a name that means nothing.
    """
    if name in ("none", "ngram"):
        return None
    folder = bundled(identity) if name == BUNDLED else local_folder(name)
    if folder is None and name != BUNDLED:
        raise DrafterError(f"engine.drafter {name!r} is neither none, ngram, {BUNDLED} nor a folder.")
    return folder


def bundled(identity: str) -> Path | None:
    """The folder of the drafter that comes with Redraft for one target."""
    root = Path(str(files("redraft.engine.drafters"))) / "bundled"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return next((folder for folder in folders if load_config(folder).target == identity), None)


def content_id(folder: Path) -> str:
    """An id that only these weights and this configuration have: 16 hex digits of a SHA-256 over the files."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        try:
            with file.open("rb") as stream:
                digest.update(file.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DrafterError(f"{folder} is no drafter checkpoint: {file.name}: {error.strerror}.") from error
    return digest.hexdigest()[:16]

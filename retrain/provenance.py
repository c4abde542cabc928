"""Where a trained drafter comes from: written into its run's folder and its model card."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from redraft.retrain.config import TrainConfig
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.sample import Sample
from redraft.retrain.data.store import load_manifest, verify


class Provenance(Struct, frozen=True, kw_only=True):
    """``target`` is the identity hash of the model drafted for, ``data`` the hash of the training data's files.

    ``initial`` is the content id of the drafter whose weights the run began from, None where they were drawn.
    """

    command: str
    commit: str | None
    target: str
    data: str
    samples: int
    tokens: int
    config: dict[str, str | int | float | bool | None]
    initial: str | None = None


def data_of(folder: Path, target: str) -> str:
    """Hash of the training data in ``folder``, which ``target`` answered.

    Raises `DataError` if another target did, or a file is not what its manifest says.
    """
    verify(folder)
    manifest = load_manifest(folder)
    if manifest.target not in (None, target):
        raise DataError(
            f"{folder} was answered by the target {manifest.target[:12]}, this one is {target[:12]}; "
            "a drafter is of use only for its own target's answers"
        )
    content = msgspec.json.encode(sorted(manifest.sha256.items()))
    return hashlib.sha256(content).hexdigest()


def provenance(
    config: TrainConfig,
    *,
    target: str,
    data: str,
    samples: Sequence[Sample],
    commit: str | None,
    initial: str | None = None,
) -> Provenance:
    """The record of the run that this process is; ``commit`` None asks git."""
    return Provenance(
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=commit or present_commit(),
        target=target,
        data=data,
        samples=len(samples),
        tokens=sum(end - start for sample in samples for start, end in sample.spans),
        config=config.model_dump(),
        initial=initial,
    )


def present_commit() -> str | None:
    """The checkout's commit, marked where files have changed since; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changes.strip() else "")


def model_card(title: str, text: str, record: Provenance, step: int) -> str:
    """Markdown that a checkpoint carries as its README."""
    rows = {
        "target": record.target,
        "training data": record.data,
        "samples": f"{record.samples} ({record.tokens} tokens)",
        "steps": step,
        **({"initial weights": record.initial} if record.initial else {}),
        "commit": record.commit or "unknown",
        "command": f"`{record.command}`",
        **{key.replace("_", " "): value for key, value in record.config.items() if key != "steps"},
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"# {title}\n\n{text}\n\n| | |\n| --- | --- |\n{table}\n"

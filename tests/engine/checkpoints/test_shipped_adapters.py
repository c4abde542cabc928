"""Every adapter that ships belongs to a known model, is small, and gives the weights that are pinned."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.engine.checkpoints import identity, pull
from redraft.engine.checkpoints.models import ADAPTERS, KNOWN_MODELS, KnownModel, MergedModel, adapter_folder

MERGED = {name: model for name, model in KNOWN_MODELS.items() if isinstance(model, MergedModel)}
MAX_BYTES = 6_000_000


@pytest.mark.unit
def test_adapters_and_merged_models_are_the_same() -> None:
    assert {folder.name for folder in ADAPTERS.glob("*")} == set(MERGED)
    assert all(isinstance(KNOWN_MODELS[model.base], KnownModel) for model in MERGED.values())


@pytest.mark.unit
@pytest.mark.parametrize("name", MERGED)
def test_an_adapter_is_small_and_has_a_card(name: str) -> None:
    files = {file.name: file.stat().st_size for file in adapter_folder(name).iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert sum(files.values()) <= MAX_BYTES


@pytest.mark.integration
@pytest.mark.parametrize("name", MERGED)
def test_a_merged_model_is_the_pinned_one_from_base_and_adapter_alone(name: str, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / MERGED[name].base).symlink_to(pull(MERGED[name].base))
    assert identity(pull(name, cache=tmp_path)) == MERGED[name].identity

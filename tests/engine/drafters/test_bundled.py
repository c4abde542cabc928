"""The drafters that come with Redraft."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from redraft.engine.checkpoints.models import KNOWN_MODELS, MergedModel
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.checkpoint import SHARD_BYTES
from redraft.engine.drafters.dflash_checkpoint import load
from redraft.engine.drafters.loading import bundled

pytestmark = pytest.mark.unit
WEIGHT_BYTES = 42_000_000


def test_the_default_target_has_a_drafter_that_is_whole() -> None:
    known = KNOWN_MODELS[EngineConfig().model]
    assert isinstance(known, MergedModel)
    folder = bundled(known.identity)
    assert folder is not None
    config, _ = load(folder)
    assert config.target == known.identity
    card = (folder / "README.md").read_text()
    assert all(said in card for said in (known.identity, "license: apache-2.0", "training data", "tau"))


def test_a_target_that_nothing_was_trained_for_has_none() -> None:
    assert bundled("0" * 64) is None


def test_all_weights_together_stay_small_enough_for_the_repository() -> None:
    engine = Path(str(files("redraft.engine")))
    weights = list(engine.glob("**/*.safetensors"))
    assert len(weights) >= 3
    assert all(file.stat().st_size <= SHARD_BYTES for file in weights)
    assert sum(file.stat().st_size for file in weights) <= WEIGHT_BYTES

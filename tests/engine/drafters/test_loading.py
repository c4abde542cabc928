"""Drafters by name: what serves, and what is said where that is not what was asked for."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.checkpoints.identity import identity
from redraft.engine.drafters.checkpoint import DrafterError
from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.drafters.loading import content_id, load_drafter
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.model import Target
from redraft.engine.types import DrafterVersion

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Target:
    config = load_config(tiny_checkpoint)
    return Target(tiny_checkpoint, config, device=torch.device("cpu"), dtype=torch.bfloat16, invariant=False)


def test_no_drafter_the_floor_and_a_folder_are_what_they_are_called(
    target: Target, tiny_checkpoint: Path, make_dflash: Callable[..., Path]
) -> None:
    assert load_drafter("none", target, "tiny", 64) is None
    assert isinstance(load_drafter("ngram", target, "tiny", 64), NgramDrafter)
    folder = make_dflash(tiny_checkpoint)
    drafter = load_drafter(str(folder), target, identity(tiny_checkpoint), 64)
    assert isinstance(drafter, DFlashDrafter)
    assert drafter.version == DrafterVersion("dflash", content_id(folder))


def test_a_target_without_a_bundled_drafter_is_served_by_the_floor_and_that_is_said(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_drafter("dflash", target, "0" * 64, 64), NgramDrafter)
    assert "no dflash drafter is bundled for target 000000000000" in caplog.text


@pytest.mark.parametrize("name", ["ngrams", "~nobody-of-that-name/drafter", "a\0b", "x" * 5000])
def test_a_name_that_is_none_is_named(target: Target, name: str) -> None:
    with pytest.raises(DrafterError, match="is neither none, ngram, dflash, eagle3, mtp nor a folder"):
        load_drafter(name, target, "tiny", 64)


def test_a_folder_without_a_drafter_is_named(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"is no drafter checkpoint: config\.json"):
        load_drafter(str(tmp_path), target, "tiny", 64)


def test_a_version_is_of_weights_and_configuration_wherever_they_lie(
    tiny_checkpoint: Path, make_dflash: Callable[..., Path], tmp_path: Path
) -> None:
    folder, other = make_dflash(tiny_checkpoint), make_dflash(tiny_checkpoint, seed=1)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "README.md").write_text("another card")
    assert content_id(copy) == content_id(folder) != content_id(other)
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert content_id(copy) != content_id(folder)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.engine.chat.grammar import GrammarCompiler
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.checkpoints.identity import identity
from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.loading import load_folder
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.model import Target
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import Commit, DrafterVersion, GenerationRequest

SLOTS = 8192
VERSION = DrafterVersion("dflash", "test")


@pytest.fixture(scope="session")
def tiny_target(tiny_checkpoint: Path) -> Target:
    torch.set_num_threads(1)
    return load_target(tiny_checkpoint)


def load_target(folder: Path, *, dtype: torch.dtype = torch.bfloat16, invariant: bool = True) -> Target:
    return Target(folder, load_config(folder), device=torch.device("cpu"), dtype=dtype, invariant=invariant)


@pytest.fixture
def make_core(tiny_target: Target, tiny_checkpoint: Path) -> Callable[..., EngineCore]:
    def make(drafter: Drafter | None = None, **overrides: Any) -> EngineCore:
        tokenizer = Tokenizer.from_folder(tiny_checkpoint)
        settings: dict[str, Any] = {
            "identity": "tiny",
            "tokenizer": tokenizer,
            "grammars": GrammarCompiler(tokenizer, tiny_target.config.vocab),
            "context_length": 512,
            "drafter": drafter or NgramDrafter(),
            "policy": FixedLength(8),
            "block_size": 8,
            "max_running": 8,
            "max_waiting": 64,
        }
        slots = overrides.pop("slots", SLOTS)
        target = overrides.pop("target", tiny_target)
        return EngineCore(target, target.new_kv(slots), **(settings | overrides))

    return make


@pytest.fixture
def make_drafter(
    make_dflash: Callable[..., Path],
    make_eagle3: Callable[..., Path],
    make_mtp: Callable[..., Path],
    tiny_checkpoint: Path,
    tiny_target: Target,
) -> Callable[..., Drafter]:
    """A drafter of random weights, of the kind that its version has."""
    makers = {"dflash": make_dflash, "eagle3": make_eagle3, "mtp": make_mtp}

    def make(
        seed: int = 0, version: DrafterVersion = VERSION, target: Target = tiny_target, **overrides: Any
    ) -> Drafter:
        folder = makers[version.kind](tiny_checkpoint, seed=seed, **overrides)
        return load_folder(folder, version, target, identity(tiny_checkpoint), SLOTS)

    return make


def run(core: EngineCore, requests: Iterable[GenerationRequest]) -> list[Commit]:
    """Everything the requests commit when submitted together."""
    for request in requests:
        core.submit(request)
    commits: list[Commit] = []
    for _ in range(100_000):
        if not (core.running or core.waiting):
            return commits
        commits.extend(core.step())
    raise AssertionError("the engine did not finish")


def answers(commits: Sequence[Commit]) -> dict[tuple[str, int], list[int]]:
    """Committed ids by request and choice."""
    ids: dict[tuple[str, int], list[int]] = {}
    for commit in commits:
        ids.setdefault((commit.request_id, commit.choice), []).extend(commit.token_ids)
    return ids

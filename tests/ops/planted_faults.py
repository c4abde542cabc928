"""Engines that are wrong on purpose; each is the main function of an engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from redraft.engine.config import EngineConfig
from redraft.engine.embedded import core, server
from redraft.engine.embedded.core import EngineCore, Running
from redraft.engine.embedded.sampler import sample


def order_dependent_noise(config: EngineConfig, socket: Path) -> None:
    """Sampling noise follows the order of calls, not the token's position."""
    calls = iter(range(10**9))

    def wrong(logits: Tensor, params: Any, *, seed: int, choice: int, position: int) -> int:
        return sample(logits, params, seed=seed, choice=choice, position=next(calls))

    core.sample = wrong
    server.main(config, socket)


def trusted_drafts(config: EngineConfig, socket: Path) -> None:
    """The first drafted token is taken whatever the target says."""
    original = EngineCore._choose

    def wrong(self: EngineCore, sequence: Running, logits: Tensor, arg_max: int, position: int) -> int:
        drafting = sequence.draft is not None and sequence.request.speculation and position == len(sequence.tokens)
        proposed = sequence.draft.propose(1).tokens if drafting and sequence.draft else ()
        return proposed[0] if proposed else original(self, sequence, logits, arg_max, position)

    EngineCore._choose = wrong  # type: ignore[method-assign]
    server.main(config, socket)

"""Engines that are wrong on purpose; each is the main function of an engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from redraft.engine.config import EngineConfig
from redraft.engine.embedded import sampler, server
from redraft.engine.embedded.core import EngineCore, Rows
from redraft.engine.embedded.sampler import TokenChooser
from redraft.engine.types import Commit


def order_dependent_noise(config: EngineConfig, socket: Path) -> None:
    """Sampling noise follows the order of calls, not the token's position."""
    calls = iter(range(10**9))
    noise_key = sampler.noise_key
    sampler.noise_key = lambda seed, choice, position: noise_key(seed, choice, next(calls))
    server.main(config, socket)


def trusted_drafts(config: EngineConfig, socket: Path) -> None:
    """The first drafted token is taken whatever the target says."""
    verify, choose = EngineCore._verify, TokenChooser.choose
    trusted: dict[TokenChooser, list[int]] = {}

    def remember(self: EngineCore, rows: Rows, *arguments: Any) -> Commit:
        trusted[rows.sequence.chooser] = list(rows.tokens[1:2])
        return verify(self, rows, *arguments)

    def wrong(self: TokenChooser, logits: Tensor, arg_max: int, position: int) -> int:
        drafted = trusted.get(self)
        return drafted.pop() if drafted else choose(self, logits, arg_max, position)

    EngineCore._verify = remember  # type: ignore[method-assign,assignment]
    TokenChooser.choose = wrong  # type: ignore[method-assign]
    server.main(config, socket)

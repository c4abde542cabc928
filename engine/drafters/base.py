"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from redraft.engine.drafters.lookup import SuffixIndex
from redraft.engine.embedded.attention import Segment
from redraft.engine.types import GREEDY, DrafterVersion, SamplingParams


class Proposal(Struct, frozen=True):
    """Drafted tokens in order, with draft_prob beside them or the length of the match they continue."""

    tokens: tuple[int, ...] = ()
    draft_prob: tuple[float, ...] | None = None
    match_length: int | None = None


LEAST_SURVIVAL = 0.1
"""The chance that all drafted tokens are accepted, below which no further one is worth a pass of the drafter's own.

A pass takes about a tenth of what a committed token saves.
"""


@dataclass(frozen=True, slots=True)
class DraftSequence:
    """One sequence as a drafter sees it: committed tokens only, and never those of another.

    ``tokens`` are prompt and answer so far; the last is the block start, and positions ``window_start`` to just before
    it have draft K/V in arena slots from ``slot + window_start``. At most ``length`` tokens are wanted, and, where each
    takes a pass, none once all before it are accepted with less than ``least_survival``. The sequence owns ``room``
    slots from the block start on.
    """

    tokens: Sequence[int]
    length: int
    least_survival: float = 0.0
    slot: int = 0
    room: int = 0
    window_start: int = 0
    index: SuffixIndex = field(default_factory=SuffixIndex)
    sampling: SamplingParams = GREEDY
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of a target pass, some of which a later pass may find to have been rejected.

    features [rows, layers * hidden]; tokens, positions and slots [rows] int64. ``segments`` lie side by side; the draft
    K/V of each begins at its position in ``windows``.
    """

    features: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    segments: Sequence[Segment]
    windows: Sequence[int]


class Drafter(Protocol):
    """Proposes tokens for all running sequences at once.

    ``feature_layers`` are the target's layers (0-based), ascending, whose outputs `materialise` takes; ``kv`` is its
    draft K/V [layers, slots, heads, head_dim], slot by slot beside the target's arena. Whoever serves it sets that, and
    None to free it; a drafter without draft K/V has none to set.
    """

    kv: Tensor | None

    @property
    def version(self) -> DrafterVersion: ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    def new_kv(self, slots: int) -> Tensor | None:
        """Empty draft K/V for an arena of ``slots``, backed by memory only where written; None if it needs none."""
        ...

    def materialise(self, rows: TargetRows) -> None:
        """Write what drafting will need of these rows into their slots of the draft K/V."""
        ...

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]: ...

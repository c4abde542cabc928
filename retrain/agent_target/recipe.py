"""Everything that decides what the adapter becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from redraft.retrain.errors import TrainingError

NAME = "smollm2-135m-agent"
BASE = "smollm2-135m"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Recipe(Struct, frozen=True):
    """Data and training of the adapter.

    ``window`` and ``batch_tokens`` in tokens; ``plain_share`` is of all examples, ``refusal_share`` of the single-turn
    tool cases. ``alpha`` over ``rank`` is the scale, which must be a power of two.
    """

    seed: int = 1
    window: int = 4096
    plain_share: float = 0.4
    refusal_share: float = 0.2
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    learning_rate: float = 2e-3
    warmup_share: float = 0.05
    clip_norm: float = 1.0
    batch_tokens: int = 32768
    epochs: int = 4


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """A recipe with ``name=value`` settings put in its place."""
    changed: dict[str, Any] = msgspec.to_builtins(recipe)
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in changed:
            raise TrainingError(f"there is no setting {name!r} in the recipe; there are: {', '.join(changed)}")
        changed[name] = value
    try:
        return msgspec.convert(changed, Recipe, strict=False)
    except msgspec.ValidationError as error:
        raise TrainingError(f"{', '.join(settings)}: {error}") from error

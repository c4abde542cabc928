"""The ``drift`` section of a deployment's YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DriftConfig(BaseModel):
    """When a change of accept length is worth a signal; counts in sessions of one stratum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    effect_floor: float = Field(
        0.05, ge=0.01, le=0.5, description="Smallest relative change of accept length that may be signalled."
    )
    sessions_per_false_alarm: int = Field(
        50_000,
        ge=1_000,
        description="Sessions of the whole deployment a false alarm: 50000 is 0.02 a day at 1,000 sessions a day.",
    )
    learning_sessions: int = Field(
        200,
        ge=30,
        description="Fewest sessions from which a stratum without a reference learns one (up to five times as many "
        "where sessions differ much); it cannot alarm before.",
    )
    cooldown_sessions: int = Field(
        200, ge=0, description="Sessions after a signal in which the same stratum gives no other."
    )

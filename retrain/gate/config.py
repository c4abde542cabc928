"""The ``gate`` section of a deployment's YAML: what the gate asks of a candidate."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GateConfig(BaseModel):
    """Shares are between 0 and 1, counts are of sessions, bootstrap draws and requests."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    anchor_margin: float = Field(0.05, gt=0, lt=1, description="Goodput that anchor sessions may lose, as a share.")
    alpha: float = Field(
        0.05, gt=0, lt=0.5, description="Chance that any of all looks at fresh traffic promotes what is no better."
    )
    min_sessions: int = Field(20, ge=2, description="Sessions below which nothing is decided.")
    min_anchor_sessions: int = Field(20, ge=2, description="Anchor sessions below which nothing is decided.")
    sequences: int = Field(1, ge=1, le=256, description="Requests in a pass: the load that goodput is judged at.")
    draws: int = Field(10_000, ge=1000, le=1_000_000, description="Bootstrap draws.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Of the bootstrap.")
    parity_sessions: int = Field(4, ge=1, description="Sessions that the engine itself answers again.")
    parity_tolerance: float = Field(
        0.05, ge=0, lt=1, description="Share by which the engine's verify steps may differ from the replay's."
    )

"""The ``traffic`` section of a deployment's YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TrafficConfig(BaseModel):
    """How captured traffic becomes data; shares are between 0 and 1, counts are of sessions or tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gate_share: float = Field(0.3, ge=0, le=1, description="The latest of the period's baseline sessions, to judge by.")
    anchor_share: float = Field(0.3, ge=0, le=1, description="Of baseline sessions: never learnt from.")
    validation_share: float = Field(0.1, ge=0, lt=1, description="Of the sessions to learn from: to choose the step.")
    replay_share: float = Field(0.25, ge=0, lt=1, description="Of what is drawn: from sessions before the period.")
    sessions: int = Field(
        200, ge=1, description="Most of each kind to learn from; a uniform sample where there are more."
    )
    judging_sessions: int = Field(
        100, ge=1, description="Most of new traffic to judge by, and of anchors: what the gate takes its time for."
    )
    max_tokens: int = Field(8192, ge=2, description="Longer contexts are left out.")
    margin: int = Field(8, ge=1, description="Tokens before and after a captured span that are learnt from too.")
    weight_cap: float = Field(4.0, ge=1, description="Most that a span kept with a low probability counts more for.")

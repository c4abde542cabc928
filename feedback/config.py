"""The ``feedback`` section of a deployment's YAML."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class FeedbackConfig(BaseModel):
    """What is kept of the answers served, how much of it, and for how long."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(
        True, description="Keep events and the tokens behind them, on this machine only, for drafters to learn from."
    )
    folder: Path | None = Field(None, description="Where; by default the model's own folder under the user's state.")
    retention_days: float = Field(7.0, gt=0, description="Older events and tokens are removed.")
    max_bytes: int = Field(
        2 << 30, ge=1 << 20, description="Disk that events and tokens may take, half each; the oldest go first."
    )
    baseline_share: float = Field(
        0.2, ge=0, le=1, description="Share of sessions kept whole, the uniform sample that judges drafters."
    )
    rejected_share: float = Field(1.0, ge=0, le=1, description="Share kept of spans that the target rejected early.")
    tool_call_share: float = Field(1.0, ge=0, le=1, description="Share kept of spans inside a tool call.")
    entropy_share: float = Field(0.25, ge=0, le=1, description="Share kept of spans where the target was unsure.")
    entropy_nats: float = Field(2.0, ge=0, description="The target is unsure where its entropy is above this.")
    draft_prob_share: float = Field(0.25, ge=0, le=1, description="Share kept of spans where the drafter was unsure.")
    draft_prob_below: float = Field(
        0.2, ge=0, le=1, description="The drafter is unsure where its probability is below this."
    )
    spans_per_hour: int = Field(
        20_000, ge=0, description="Spans kept of one tenant in an hour; what is over is counted."
    )
    context_tokens_per_hour: int = Field(
        20_000_000, ge=0, description="Prompt and answer tokens kept of one tenant in an hour."
    )
    queue_turns: int = Field(
        1024, ge=1, description="Answers that may wait to be written; more are dropped and counted."
    )
    queue_tokens: int = Field(4_000_000, ge=1, description="Prompt and answer tokens that may wait to be written.")

"""The ``retrain`` section of a deployment's YAML."""

from __future__ import annotations

from pathlib import Path

import platformdirs
from pydantic import BaseModel, ConfigDict, Field

RUN_DATA = "data.msgpack"
"""In an unfinished run's folder: what it learns from, tokens included."""


class RetrainConfig(BaseModel):
    """Settings of the loop that retrains, judges and publishes drafters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path | None = Field(
        None,
        description="Where drafter versions, the serving pointer and what training keeps are; by default in the "
        "user's state folder, shared by deployments of one target.",
    )
    auto_promote: bool = Field(
        True, description="Whether a candidate that the gate accepted serves at once, or waits for a person."
    )
    keep_refused: int = Field(
        5, ge=0, description="Refused or inconclusive versions whose weights are kept; their records always are."
    )

    recipe: Path | None = Field(
        None,
        description="How a candidate is trained, a YAML file of the keys in retrain/config.py; unset: Redraft's own.",
    )
    feature_bytes: int = Field(
        2 << 30, ge=0, description="Disk for features, which are made again where they are lost."
    )

    @property
    def home(self) -> Path:
        """The folder in force."""
        return (self.folder or platformdirs.user_state_path("redraft") / "retrain").expanduser()

    @property
    def registry(self) -> Path:
        return self.home / "registry"

    @property
    def runs(self) -> Path:
        """A folder a target, in which each run has one."""
        return self.home / "runs"

    @property
    def features(self) -> Path:
        return self.home / "features"

    def forget_tokens(self) -> None:
        """Remove what training keeps of tokens, whosever: unfinished runs' data, and features, which are made again.

        A run that is under way misses its data, and gives up.
        """
        for file in (*self.runs.glob(f"*/*/{RUN_DATA}"), *self.features.glob("*")):
            file.unlink(missing_ok=True)

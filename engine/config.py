"""The ``engine`` section of a deployment's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from redraft.engine.checkpoints.models import DEFAULT_MODEL


class EngineConfig(BaseModel):
    """Settings of the embedded engine; sizes in bytes, counts in requests or tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(DEFAULT_MODEL, description="A pulled model's name, a Hugging Face id, or a local folder.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the target runs.")
    threads: int = Field(0, ge=0, description="CPU threads; 0 takes every core this process may use.")
    lossless: Literal["auto", "invariant", "tolerant"] = Field(
        "auto",
        description="auto takes invariant where the start-up self-test proves it, else tolerant.",
    )
    drafter: str = Field(
        "dflash",
        min_length=1,
        description="Who proposes tokens: none, ngram, dflash, eagle3 or mtp (the version that was promoted, else the "
        "one of that kind that is bundled for the model, else n-gram), or a drafter checkpoint's folder.",
    )
    block_size: int = Field(8, ge=2, le=64, description="Block start plus draft slots, as SGLang counts.")
    max_running: int = Field(8, ge=1, le=256, description="Choices that decode at once.")
    max_waiting: int = Field(64, ge=0, description="Requests that may queue before new ones are turned away.")
    kv_bytes: int = Field(2 << 30, ge=1 << 20, description="Budget of the K/V cache, running and reusable together.")
    context_length: int | None = Field(None, ge=16, description="Upper bound on tokens; the model's own if unset.")
    socket: Path | None = Field(None, description="Unix socket; by default in the deployment's run folder.")

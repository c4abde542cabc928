"""The ``gateway`` section of a deployment's YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GatewayConfig(BaseModel):
    """Where the HTTP surface listens, and the limits it holds clients to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on; loopback unless you mean otherwise.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Larger request bodies are answered with 413.")
    default_max_tokens: int | None = Field(
        None, ge=1, description="Answer length where the client names none; unset means the rest of the context."
    )
    session_idle_seconds: float = Field(3600.0, gt=0, description="A session unused for this long is forgotten.")
    max_sessions: int = Field(10_000, ge=1, description="Sessions remembered; the least recently used go first.")

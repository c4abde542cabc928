"""The default target in a deployment of its own, for the clients that people use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.engine.config import EngineConfig
from redraft.ops.bench.deployment import running


@pytest.fixture(scope="package")
def deployment(default_target: Path) -> Iterator[str]:
    """The gateway's base URL, as clients take it."""
    with asyncio.Runner() as runner:
        context = running(EngineConfig())
        _, url = runner.run(context.__aenter__())
        try:
            yield f"{url}/v1"
        finally:
            runner.run(context.__aexit__(None, None, None))

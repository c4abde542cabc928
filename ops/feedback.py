"""What a deployment keeps of its answers: where, and the parts that write and read it."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from pathlib import Path

from platformdirs import user_state_path

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints import served_name
from redraft.engine.checkpoints.checkpoint import chat_template
from redraft.feedback.capture import Capture
from redraft.feedback.local_contexts import LocalContextStore
from redraft.feedback.metrics import CaptureMetrics
from redraft.feedback.recorder import DAY, Recorder
from redraft.feedback.segments import SegmentLog
from redraft.gateway.tool_call_spans import tool_call_spans
from redraft.ops.config import RedraftConfig

logger = logging.getLogger(__name__)


def feedback_folder(config: RedraftConfig) -> Path:
    """Where; one folder a model."""
    name = served_name(config.engine.model).replace("/", "--")
    return (config.feedback.folder or user_state_path("redraft") / "feedback" / name).expanduser()


def open_log(config: RedraftConfig, metrics: CaptureMetrics | None = None) -> SegmentLog:
    """The log of events; only the gateway's appends to it."""
    feedback = config.feedback
    return SegmentLog(
        feedback_folder(config) / "events",
        max_bytes=feedback.max_bytes // 2,
        max_age=feedback.retention_days * DAY,
        metrics=metrics,
    )


def open_contexts(config: RedraftConfig, metrics: CaptureMetrics | None = None) -> LocalContextStore:
    """The tokens behind the events."""
    return LocalContextStore(
        feedback_folder(config) / "contexts", max_bytes=config.feedback.max_bytes // 2, metrics=metrics
    )


def start_recorder(config: RedraftConfig, model_folder: Path, tokenizer: Tokenizer) -> Recorder | None:
    """What the gateway gives its answers to; None where nothing is to be kept."""
    if not config.feedback.enabled:
        return None
    logger.info("answers are kept in %s, to learn from; feedback.enabled: false keeps none", feedback_folder(config))
    capture = Capture(
        config.feedback,
        tokenizer=hashlib.sha256((model_folder / "tokenizer.json").read_bytes()).hexdigest(),
        template=hashlib.sha256((chat_template(model_folder) or "").encode()).hexdigest(),
        tool_calls=partial(tool_call_spans, tokenizer),
    )
    metrics = CaptureMetrics()
    return Recorder(capture, open_log(config, metrics), open_contexts(config, metrics), config.feedback, metrics)

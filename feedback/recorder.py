"""From the event loop to the disk: answers wait in a bounded queue, and a thread of its own writes them.

Serving never waits: what the queue has no room for, and what cannot be written, is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from redraft.engine.types import Commit, FinishReason, GenerationRequest, VerifyStep
from redraft.feedback.capture import Capture, Captured, Turn
from redraft.feedback.config import FeedbackConfig
from redraft.feedback.contexts import ContextStore
from redraft.feedback.events import Reason, SpanEvent, SpanSink
from redraft.feedback.metrics import CaptureMetrics, DropCause

logger = logging.getLogger(__name__)

BATCH_TURNS = 64
RETRY_SECONDS = (0.1, 0.5, 2.0)
"""Pauses before a batch that could not be written is tried again; then it is dropped."""

CLOSE_SECONDS = 0.75
"""For what still waits at shutdown; the supervisor does not wait much longer."""

MAINTAIN_SECONDS = 600.0
LOG_SECONDS = 60.0
DAY = 86_400


class Recorder:
    """Takes answers as they end; give it to the gateway, and ``close`` it last. Safe to call from any thread."""

    def __init__(
        self,
        capture: Capture,
        sink: SpanSink,
        contexts: ContextStore,
        config: FeedbackConfig,
        metrics: CaptureMetrics,
    ) -> None:
        self._capture = capture
        self._sink = sink
        self._contexts = contexts
        self._config = config
        self.metrics = metrics
        self._changed = threading.Condition()
        self._queue: deque[Turn] = deque()
        self._tokens = 0
        self._busy = False
        self._closing = threading.Event()
        self._logged = -LOG_SECONDS
        metrics.queued.set_function(lambda: len(self._queue))
        self._thread = threading.Thread(target=self._run, name="redraft-recorder", daemon=True)
        self._thread.start()

    def recording(self, request: GenerationRequest, choice: int, target: str) -> Recording:
        """Begin to follow one choice of a request."""
        return Recording(self, request, choice, target)

    def record(self, turn: Turn) -> None:
        """Take a turn in, or drop it, at once."""
        started = time.perf_counter()
        size = _size(turn)
        with self._changed:
            if self._closing.is_set():
                self.metrics.dropped("closed")
            elif len(self._queue) >= self._config.queue_turns or self._tokens + size > self._config.queue_tokens:
                self.metrics.dropped("queue_full")
            else:
                self._queue.append(turn)
                self._tokens += size
                self._changed.notify_all()
        self.metrics.spent("event_loop", time.perf_counter() - started)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was recorded is written or dropped; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what waits, for as long as ``timeout``; what is left then is dropped and counted."""
        self.flush(timeout)
        with self._changed:
            self._closing.set()
            if self._queue:
                self.metrics.dropped("closed", len(self._queue))
                self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closing.is_set():
            batch = self._take(due - time.monotonic())
            started = time.thread_time()
            if time.monotonic() >= due:
                self._maintain()
                due = time.monotonic() + MAINTAIN_SECONDS
            if batch:
                self._write(batch)
                self._done(batch)
            self.metrics.spent("worker", time.thread_time() - started)
        try:
            self._sink.close()
        except OSError as error:
            self._complain(f"the event log could not be closed: {error}")

    def _take(self, wait: float) -> list[Turn]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set(), max(wait, 0))
            batch = [self._queue.popleft() for _ in range(min(BATCH_TURNS, len(self._queue)))]
            self._busy = bool(batch)
            return batch

    def _done(self, batch: Sequence[Turn]) -> None:
        with self._changed:
            self._tokens -= sum(map(_size, batch))
            self._busy = False
            self._changed.notify_all()

    def _write(self, batch: Sequence[Turn]) -> None:
        captured = [each for turn in batch if (each := self._captured(turn)) is not None]
        for pause in (*RETRY_SECONDS, None):
            try:
                self._store(captured)
                return
            except OSError as error:
                self._maintain()
                if pause is None or self._closing.wait(pause):
                    self._drop("storage", len(captured), str(error))
                    return
            except Exception as error:  # noqa: BLE001 (a fault of ours costs events, never serving)
                self._drop("fault", len(captured), repr(error))
                return

    def _captured(self, turn: Turn) -> Captured | None:
        try:
            return self._capture(turn)
        except Exception as error:  # noqa: BLE001 (as above)
            self._drop("fault", 1, repr(error))
            return None

    def _store(self, captured: Sequence[Captured]) -> None:
        """Contexts first: an event never refers to one that is yet to be written."""
        for each in captured:
            if each.context is not None:
                self._contexts.put(each.context)
        events = [event for each in captured for event in each.events]
        if events:
            self._sink.append(events)
        self.metrics.recorded(len(captured))
        for reason, count in Counter(event.reason for event in events if isinstance(event, SpanEvent)).items():
            self.metrics.spans(reason, count)
        for reason, count in sum((each.over_quota for each in captured), Counter[Reason]()).items():
            self.metrics.over_quota(reason, count)

    def _maintain(self) -> None:
        now = time.time()
        try:
            self._sink.maintain(now)
            self.metrics.removed("turn", self._contexts.expire(now - self._config.retention_days * DAY))
        except Exception as error:  # noqa: BLE001 (as above)
            self._complain(f"what is too old could not be removed: {error}")

    def _drop(self, cause: DropCause, turns: int, why: str) -> None:
        if turns:
            self.metrics.dropped(cause, turns)
            self._complain(f"answers are served but not recorded: {why}")

    def _complain(self, message: str) -> None:
        """At most one line a minute; the metrics count all."""
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            logger.warning("feedback: %s", message)


class Recording:
    """One choice on its way: its tokens and verify steps, recorded when it ends."""

    def __init__(self, recorder: Recorder, request: GenerationRequest, choice: int, target: str) -> None:
        self._recorder = recorder
        self._request = request
        self._choice = choice
        self._target = target
        self._tokens: list[int] = []
        self._steps: list[VerifyStep] = []
        self._seed = request.sampling.seed
        self._ended = False

    def add(self, commit: Commit) -> None:
        """Take a commit of this choice; its last one records it."""
        self._tokens += commit.token_ids
        if commit.verify_step is not None:
            self._steps.append(commit.verify_step)
        if commit.seed is not None:
            self._seed = commit.seed
        if commit.finish_reason is not None:
            self._end(commit.finish_reason)

    def abandon(self) -> None:
        """The request is over; record what was committed of a choice that did not end by itself."""
        if not self._ended and self._tokens:
            self._end("abort")

    def _end(self, finish_reason: FinishReason) -> None:
        self._ended = True
        self._recorder.record(
            Turn(
                request=self._request,
                choice=self._choice,
                target=self._target,
                token_ids=tuple(self._tokens),
                steps=tuple(self._steps),
                finish_reason=finish_reason,
                seed=self._seed,
                time=time.time(),
            )
        )


def _size(turn: Turn) -> int:
    return len(turn.request.prompt_ids) + len(turn.token_ids)

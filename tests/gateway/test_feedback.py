"""Every answer that the gateway gives, whole or cut off, leaves an event that agrees with what its client saw."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.chat.encoding import ChatEncoder
from redraft.feedback.capture import Capture
from redraft.feedback.config import FeedbackConfig
from redraft.feedback.events import Event, SpanEvent, TurnEvent, session_hash
from redraft.feedback.local_contexts import LocalContextStore
from redraft.feedback.metrics import CaptureMetrics
from redraft.feedback.recorder import Recorder
from redraft.gateway.app import create_app
from redraft.gateway.config import GatewayConfig
from redraft.gateway.tool_call_spans import tool_call_spans

from .conftest import Running, ScriptedEngine, serving

pytestmark = pytest.mark.unit


class Sink:
    """Keeps events in memory; ``open`` holds them up while it is clear."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.open = threading.Event()
        self.open.set()
        self.closed = False

    def append(self, events: Sequence[Event]) -> None:
        self.open.wait()
        self.events += events

    def maintain(self, now: float) -> None: ...

    def close(self) -> None:
        self.closed = True


class Recorded:
    """A gateway whose every session is baseline, and what it recorded."""

    def __init__(self, gateway: Running, recorder: Recorder, sink: Sink, contexts: LocalContextStore) -> None:
        self.gateway = gateway
        self.engine = gateway.engine
        self.recorder = recorder
        self.sink = sink
        self.contexts = contexts

    def turns(self) -> list[TurnEvent]:
        assert self.recorder.flush(10)
        return [event for event in self.sink.events if isinstance(event, TurnEvent)]


@pytest.fixture
def recorded(chat: ChatEncoder, tmp_path: Path) -> Iterator[Recorded]:
    config = FeedbackConfig(baseline_share=1.0)
    metrics, sink, contexts = CaptureMetrics(), Sink(), LocalContextStore(tmp_path)
    capture = Capture(
        config,
        tokenizer="tokenizer",
        template="template",
        tool_calls=lambda tokens: tool_call_spans(chat.tokenizer, tokens),
    )
    recorder = Recorder(capture, sink, contexts, config, metrics)
    engine = ScriptedEngine(chat.tokenizer)
    with serving(create_app(GatewayConfig(), engine, chat, recorder), engine) as running:
        yield Recorded(running, recorder, sink, contexts)


def drafted(engine: ScriptedEngine, step: Any, text: str, choice: int = 0, **fields: Any) -> list[Any]:
    """An answer of one prefilled token, then one verify step a word."""
    first, *rest = text.split(" ")
    commits = [engine.commit(engine.ids(first), choice, seed=5)]
    for number, word in enumerate(rest):
        ids = engine.ids(" " + word)
        last = fields if number == len(rest) - 1 else {}
        commits.append(engine.commit(ids, choice, verify_step=step(ids, choice=choice), **last))
    return commits


def test_an_answers_event_agrees_with_its_statistics_and_its_tokens_are_kept(recorded: Recorded, step: Any) -> None:
    engine = recorded.engine
    engine.script = lambda request: drafted(engine, step, "one two three", finish_reason="stop")
    headers = {"x-redraft-session": "my-session", "x-redraft-agent": "coder"}
    body = recorded.gateway.body(redraft={"return_statistics": True}, temperature=0)
    response = recorded.gateway.http.post("/v1/chat/completions", json=body, headers=headers).json()
    (event,) = recorded.turns()
    (counts,) = event.counts
    length = response["redraft"]["accept_length"]
    assert (counts.committed, counts.verify_steps) == (length["committed_tokens"], length["verify_steps"]) == (10, 2)
    assert event.origin.request_id == response["id"]
    assert event.origin.session == session_hash("default", "my-session")
    assert (event.origin.agent_type, event.origin.target) == ("coder", "sha256:0123456789abcdef")
    assert (event.origin.tokenizer, event.origin.template) == ("tokenizer", "template")
    assert (event.sampling.seed, event.finish_reason) == (5, "stop")
    assert event.context is not None
    context = recorded.contexts.get("default", event.context)
    assert context is not None
    assert context.token_ids == engine.requests[0].prompt_ids + engine.ids("one two three")
    assert context.prompt_tokens == event.prompt_tokens == response["usage"]["prompt_tokens"]
    assert [span.reason for span in recorded.sink.events if isinstance(span, SpanEvent)] == ["baseline"]


def test_every_choice_of_every_prompt_is_an_answer_of_its_own(recorded: Recorded, step: Any) -> None:
    engine = recorded.engine
    engine.script = lambda request: [
        commit
        for choice in range(request.n)
        for commit in drafted(engine, step, f"a b{choice}", choice, finish_reason="length")
    ]
    response = recorded.gateway.post_text(prompt=["Hi", "you"], n=2, stream=False)
    assert response.status_code == 200
    turns = recorded.turns()
    id_ = response.json()["id"]
    assert {(turn.origin.request_id, turn.origin.choice) for turn in turns} == {
        (name, choice) for name in (id_, f"{id_}-1") for choice in range(2)
    }
    assert len({turn.id for turn in turns}) == 4
    tokens = {
        (turn.origin.request_id, turn.origin.choice): recorded.contexts.get("default", turn.context or "")
        for turn in turns
    }
    assert all(context is not None for context in tokens.values())
    assert tokens[f"{id_}-1", 1].token_ids == engine.ids("you") + engine.ids("a b1")  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["hang-up", "engine gives up", "engine dies", "engine ends early"])
def test_an_answer_cut_off_is_an_event_of_what_was_committed(
    recorded: Recorded, step: Any, hang: object, how: str
) -> None:
    engine = recorded.engine
    begun = drafted(engine, step, "one two")
    match how:
        case "hang-up":
            engine.script = lambda request: [*begun, hang]
            with socket.create_connection(("127.0.0.1", recorded.gateway.port)) as client:
                body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}'
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                client.sendall(head + body)
                assert engine.hanging.wait(10)
            assert engine.closed.wait(10)
            deadline = time.monotonic() + 10
            while recorded.gateway.metric("redraft_requests_in_flight"):
                assert time.monotonic() < deadline
        case "engine gives up":
            engine.script = lambda request: [*begun, engine.commit((), finish_reason="abort")]
            assert recorded.gateway.post().status_code == 503
        case "engine dies":
            engine.script = lambda request: [*begun, RuntimeError("gone")]
            assert recorded.gateway.post().status_code == 500
        case "engine ends early":
            engine.script = lambda request: begun
            assert recorded.gateway.post().status_code == 503
    (event,) = recorded.turns()
    assert (event.finish_reason, event.completion_tokens, event.counts[0].committed) == ("abort", 7, 4)
    assert recorded.sink.events == [event]


def test_what_never_began_leaves_nothing(recorded: Recorded) -> None:
    recorded.engine.script = lambda request: [RuntimeError("no")]
    assert recorded.gateway.post().status_code == 500
    assert recorded.gateway.post(messages=[]).status_code == 400
    assert recorded.turns() == []


def test_answers_come_while_nothing_can_be_written(recorded: Recorded) -> None:
    recorded.sink.open.clear()
    for _ in range(20):
        assert recorded.gateway.post().status_code == 200
    assert recorded.sink.events == []
    recorded.sink.open.set()
    assert len(recorded.turns()) == 20


def test_what_became_of_answers_is_among_the_metrics_and_the_last_are_written_at_shutdown(
    recorded: Recorded,
) -> None:
    recorded.gateway.post()
    recorded.turns()
    assert recorded.gateway.metric("redraft_capture_recorded_turns_total") == 1
    recorded.gateway.post()
    recorded.gateway.server.should_exit = True
    recorded.gateway.thread.join(20)
    assert len(recorded.turns()) == 2
    recorded.recorder._thread.join(10)
    assert recorded.sink.closed


def test_without_a_recorder_there_is_nothing_of_it(gateway: Running) -> None:
    assert gateway.post().status_code == 200
    assert "redraft_capture" not in gateway.http.get("/metrics").text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('x<tool_call>{"a"}</tool_call>', ['<tool_call>{"a"}</tool_call>']),
        (
            "<tool_call>1</tool_call>\n<tool_call>2</tool_call> é",
            ["<tool_call>1</tool_call>", "<tool_call>2</tool_call>"],
        ),
        ("ü <tool_call>cut o", ["<tool_call>cut o"]),
        ("</tool_call> <tool_cal", []),
        ("", []),
    ],
)
def test_tool_calls_are_found_among_the_tokens(chat: ChatEncoder, text: str, calls: list[str]) -> None:
    ids = chat.tokenizer.encode_ordinary(text)
    assert [chat.tokenizer.decode(ids[start:end]) for start, end in tool_call_spans(chat.tokenizer, ids)] == calls

"""One client's large request is no other client's delay."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redraft.engine.chat.encoding import ChatEncoder

pytestmark = pytest.mark.unit


def test_others_are_answered_while_a_large_prompt_is_prepared(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preparing, going = threading.Event(), threading.Event()
    encode_chat = ChatEncoder.encode_chat

    def slow_encode_chat(self: ChatEncoder, messages: Any, *arguments: Any) -> tuple[int, ...]:
        if len(messages[0].content) > 500_000:
            preparing.set()
            assert going.wait(20)
        return encode_chat(self, messages, *arguments)

    monkeypatch.setattr(ChatEncoder, "encode_chat", slow_encode_chat)
    large = [{"role": "user", "content": "x" * 900_000}]
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(gateway.post, messages=large)
        assert preparing.wait(20)
        try:
            assert gateway.http.get("/health").status_code == 200
            assert gateway.post().status_code == 200
            assert not refused.done()
        finally:
            going.set()
        assert refused.result().json()["error"]["code"] == "context_length_exceeded"


def test_a_large_body_is_read_and_refused_while_others_are_answered(gateway: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(gateway.http.post, "/v1/chat/completions", content=b"x" * 10_000_000) for _ in range(3)]
        small = [pool.submit(gateway.post) for _ in range(10)]
        assert {request.result().status_code for request in large} == {413}
        assert {request.result().status_code for request in small} == {200}

"""Traffic: sessions turn by turn in closed loop, and every failure counted as one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.ops.demo.traffic import Client, TurnResult, drive
from redraft.retrain.data.conversation import Conversation

pytestmark = pytest.mark.unit

CALL = ToolCall("call_1", "look", "{}")
SESSION = Conversation(
    "a",
    "bfcl-multi-turn",
    "f",
    (Tool("look", "Looks.", {"type": "object", "properties": {}}),),
    (
        Message(role="user", content="Look."),
        Message(role="assistant", content=None, tool_calls=(CALL,)),
        Message(role="tool", content="A cat.", tool_call_id="call_1"),
        Message(role="assistant", content="There is a cat."),
    ),
)
ANSWER = (
    'data: {"choices": [{"delta": {"content": "A"}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "B"}}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
    "data: [DONE]\n\n"
)


async def ask(handler: Callable[[httpx.Request], httpx.Response], turns: int = 9) -> list[TurnResult]:
    client = Client("http://test", "m", "agent", 8, transport=httpx.MockTransport(handler))
    try:
        return [result async for result in client.session(SESSION, "s1", turns)]
    finally:
        await client.close()


async def test_a_session_is_asked_turn_by_turn_with_its_forced_history_and_its_name() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, text=ANSWER)

    results = await ask(answer)
    assert [(result.turn, result.tokens, result.error) for result in results] == [(1, 5, None), (3, 5, None)]
    first, second = (json.loads(request.content) for request in asked)
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert second["messages"][2]["tool_call_id"] == "call_1"
    assert {request.headers["x-redraft-session"] for request in asked} == {"s1"}
    assert {request.headers["x-redraft-agent"] for request in asked} == {"agent"}


async def test_only_the_first_turns_are_asked_where_fewer_are_wanted() -> None:
    assert len(await ask(lambda request: httpx.Response(200, text=ANSWER), turns=1)) == 1


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(503, text='{"error": {"message": "loading"}}'),
        httpx.Response(200, text='data: {"choices": [{"delta": {"content": "A"}}]}\n\n'),
        httpx.Response(200, text='data: {"error": {"message": "the engine died"}}\n\n'),
        httpx.Response(200, text="data: {broken\n\n"),
        httpx.Response(200, text=""),
    ],
    ids=["refused", "broken off", "error in the stream", "no JSON", "nothing"],
)
async def test_whatever_is_no_whole_answer_is_a_failure_in_words(response: httpx.Response) -> None:
    results = await ask(lambda request: response)
    assert [bool(result.error) for result in results] == [True, True]


async def test_a_connection_that_breaks_is_a_failure() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone")

    assert [result.error for result in await ask(broken)] == ["ReadError: gone"] * 2


class Slow(Client):
    """Counts how many sessions run at once."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def session(self, session: Conversation, name: str, turns: int) -> AsyncIterator[TurnResult]:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        yield TurnResult(session=name, turn=1, started=0.0)


async def test_so_many_sessions_run_at_once_and_none_begins_once_it_is_enough() -> None:
    client, done = Slow(), list[str]()
    await drive(
        client,
        ((f"s{number}", SESSION) for number in range(100)),
        concurrency=3,
        turns=1,
        think=0,
        report=lambda result: done.append(result.session),
        go_on=lambda: len(done) < 10,
    )
    assert client.most == 3
    assert 10 <= len(done) <= 12

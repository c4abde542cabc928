"""A session is what its client says, or the conversation it continues; never another tenant's."""

from __future__ import annotations

from typing import Any

import pytest

from redraft.engine.chat.messages import Message, ToolCall
from redraft.gateway.sessions import Sessions, beyond_first_user, message_chain

pytestmark = pytest.mark.unit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def links(*texts: str) -> list[bytes]:
    messages = [Message("system" if i == 0 else "user", text) for i, text in enumerate(texts)]
    return list(beyond_first_user(messages, message_chain(messages)))


def session_of(gateway: Any, messages: list[Any], **headers: str) -> str:
    response = gateway.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}, headers=headers)
    assert response.status_code == 200, response.text
    assert gateway.engine.requests[-1].session_id == response.headers["x-redraft-session"]
    return str(response.headers["x-redraft-session"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_that_is_continued_stays_one_session(serve: Any) -> None:
    gateway = serve()
    turns = [{"role": "system", "content": "Be brief."}, user("one")]
    first = session_of(gateway, turns)
    for text in ("two", "three"):
        turns = [*turns, assistant("Hello there."), user(text)]
        assert session_of(gateway, turns) == first


def test_the_same_opening_is_not_yet_the_same_session(serve: Any) -> None:
    gateway = serve()
    opening = [{"role": "system", "content": "Be brief."}, user("one")]
    first, second = session_of(gateway, opening), session_of(gateway, opening)
    assert first != second
    assert session_of(gateway, [*opening, assistant("Something else."), user("two")]) not in (first, second)


def test_an_answer_the_client_edited_does_not_lose_the_session_later_on(serve: Any) -> None:
    gateway = serve()
    turns = [user("one"), assistant("Hello there."), user("two")]
    first = session_of(gateway, turns)
    assert session_of(gateway, [*turns, assistant("Edited."), user("three")]) == first


def test_the_header_decides(serve: Any) -> None:
    gateway = serve()
    turns = [user("one"), assistant("Hello there."), user("two")]
    inferred = session_of(gateway, turns)
    assert session_of(gateway, turns, **{"x-redraft-session": "mine"}) == "mine"
    assert inferred != "mine"


def test_a_streamed_answer_continues_a_session_too(serve: Any) -> None:
    gateway = serve()
    opening = [user("one")]
    response = gateway.http.post("/v1/chat/completions", json={"model": "tiny", "messages": opening, "stream": True})
    assert (
        session_of(gateway, [*opening, assistant("Hello there."), user("two")]) == response.headers["x-redraft-session"]
    )


def test_what_clients_spell_differently_is_the_same_message() -> None:
    call = ToolCall("call_1", "add", '{"a": 1, "b": 2}')
    respelt = ToolCall("call_9", "add", '{"b":2,"a":1}')
    assert message_chain([Message("assistant", None, (call,))]) == message_chain([Message("assistant", "", (respelt,))])
    assert message_chain([Message("developer", "x")]) == message_chain([Message("system", "x")])
    other = ToolCall("call_1", "add", '{"a": 1, "b": 3}')
    assert message_chain([Message("assistant", None, (call,))]) != message_chain([Message("assistant", None, (other,))])


def test_broken_arguments_are_compared_as_they_are() -> None:
    deep = ToolCall("c", "add", "[" * 100_000)
    assert message_chain([Message("assistant", None, (deep,))])


def test_the_longest_shared_prefix_wins() -> None:
    sessions = Sessions(100, 10, Clock())
    sessions.remember("t", "short", links("s", "a", "b"))
    sessions.remember("t", "long", links("s", "a", "b", "c")[-1:])
    assert sessions.find("t", links("s", "a", "b", "c", "d")) == "long"
    assert sessions.find("t", links("s", "a", "b", "x")) == "short"
    assert sessions.find("t", links("s", "a")) is None


def test_sessions_never_cross_tenants() -> None:
    sessions = Sessions(100, 10, Clock())
    sessions.remember("one", "s1", links("s", "a", "b"))
    assert sessions.find("two", links("s", "a", "b")) is None
    sessions.remember("two", "s1", links("s", "a", "c"))
    assert sessions.find("one", links("s", "a", "c")) is None


def test_idle_sessions_are_forgotten() -> None:
    clock = Clock()
    sessions = Sessions(100, 10, clock)
    sessions.remember("t", "old", links("s", "a", "b"))
    clock.now = 60
    sessions.remember("t", "new", links("s", "a", "c"))
    clock.now = 120
    assert sessions.find("t", links("s", "a", "b")) is None
    assert sessions.find("t", links("s", "a", "c")) == "new"
    assert len(sessions) == 1


def test_the_number_of_sessions_and_their_memory_are_bounded() -> None:
    sessions = Sessions(100, 3, Clock())
    for i in range(10):
        sessions.remember("t", f"s{i % 2}", links("s", "a", f"often {i}"))
        sessions.remember("t", f"once{i}", links("s", "a", f"once {i}"))
    assert len(sessions) == 3
    assert sessions.find("t", links("s", "a", "often 9")) == "s1"
    assert sessions.find("t", links("s", "a", "once 0")) is None
    for i in range(1000):
        sessions.remember("t", "s1", links("s", "a", f"turn {i}"))
    assert sum(len(session.links) for session in sessions._sessions.values()) == len(sessions._by_link) < 200


def test_a_link_that_moved_to_another_session_outlives_the_first() -> None:
    clock = Clock()
    sessions = Sessions(100, 10, clock)
    sessions.remember("t", "first", links("s", "a", "b"))
    clock.now = 90
    sessions.remember("t", "second", links("s", "a", "b"))
    clock.now = 150
    assert sessions.find("t", links("s", "a", "b")) == "second"

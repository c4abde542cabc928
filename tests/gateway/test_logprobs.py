"""Log-probabilities stand beside the answer's tokens, exactly: none missing, none of what was cut away."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from redraft.engine.types import TokenLogprob

pytestmark = pytest.mark.unit


def scored(gateway: Any, *texts: str, **last: Any) -> Any:
    """A script with a commit for each text and none for the end."""
    engine = gateway.engine
    commits = [engine.commit(engine.ids(text)) for text in texts]
    commits[-1] = msgspec.structs.replace(commits[-1], **{"finish_reason": "stop", **last})
    return lambda request: commits


def entries(response: Any) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = response.json()["choices"][0]["logprobs"]["content"]
    return content


def test_every_token_has_its_string_bytes_and_alternatives(gateway: Any) -> None:
    gateway.engine.script = scored(gateway, "Hé")
    first, second, third = entries(gateway.post(logprobs=True, top_logprobs=2))
    h, c3, a9 = gateway.engine.ids("Hé")
    assert (first["token"], first["bytes"], first["logprob"]) == ("H", [0x48], -h / 8)
    assert (second["token"], second["bytes"], second["logprob"]) == ("bytes:\\xc3", [0xC3], -c3 / 8)
    assert (third["token"], third["bytes"], third["logprob"]) == ("bytes:\\xa9", [0xA9], -a9 / 8)
    assert first["top_logprobs"] == [
        {"token": "I", "logprob": -0.25, "bytes": [0x49]},
        {"token": "J", "logprob": -0.5, "bytes": [0x4A]},
    ]


def test_a_control_token_has_a_name_and_no_bytes(gateway: Any) -> None:
    gateway.engine.script = lambda request: gateway.engine.answer("H")
    *_, end = entries(gateway.post(logprobs=True))
    assert (end["token"], end["bytes"], end["top_logprobs"]) == ("<|im_end|>", None, [])


def test_an_impossible_token_is_json(gateway: Any) -> None:
    gateway.engine.script = lambda request: [
        gateway.engine.commit((5,), finish_reason="stop", logprobs=(TokenLogprob(-math.inf, ((6, -math.inf),)),))
    ]
    gateway.engine.scored = lambda commit, request: commit
    try:
        (entry,) = entries(gateway.post(logprobs=True, top_logprobs=1))
    finally:
        del gateway.engine.scored
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("cut", range(1, 8))
def test_nothing_of_a_token_in_or_past_a_stop_string_remains(gateway: Any, cut: int, stream: bool) -> None:
    text = "a é STOP"
    ids = gateway.engine.ids(text)
    gateway.engine.script = lambda request: [
        gateway.engine.commit(ids[:cut]),
        gateway.engine.commit(ids[cut:], finish_reason="stop", text_end=4),
    ]
    asked = {"logprobs": True, "stop": "STOP"}
    if stream:
        chunks = gateway.openai.chat.completions.create(**gateway.body(**asked), stream=True)
        found = [entry.bytes for chunk in chunks for entry in (chunk.choices[0].logprobs or Nothing).content]
    else:
        found = [entry["bytes"] for entry in entries(gateway.post(**asked))]
    assert b"".join(map(bytes, found)) == "a é ".encode()


class Nothing:
    content: tuple[()] = ()


def test_a_stream_gives_each_entry_with_its_text(gateway: Any) -> None:
    gateway.engine.script = scored(gateway, "ab", "ST", "c")
    chunks = list(gateway.openai.chat.completions.create(**gateway.body(logprobs=True, stop="STOP"), stream=True))
    pairs = [
        (chunk.choices[0].delta.content or "", "".join(entry.token for entry in chunk.choices[0].logprobs.content))
        for chunk in chunks
        if chunk.choices[0].logprobs
    ]
    assert ("ab", "ab") in pairs
    assert "".join(text for text, _ in pairs) == "".join(tokens for _, tokens in pairs) == "abSTc"


def test_tokens_of_a_tool_call_are_among_them(gateway: Any) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    gateway.engine.script = scored(gateway, call[:20], call[20:])
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = gateway.post(logprobs=True, tools=tools)
    assert response.json()["choices"][0]["message"]["tool_calls"]
    assert "".join(entry["token"] for entry in entries(response)) == call


def test_text_completions_have_the_legacy_shape(gateway: Any) -> None:
    gateway.engine.script = scored(gateway, "Aé")
    logprobs = gateway.post_text(logprobs=1).json()["choices"][0]["logprobs"]
    a, c3, a9 = gateway.engine.ids("Aé")
    assert logprobs["tokens"] == ["A", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-a / 8, -c3 / 8, -a9 / 8]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["top_logprobs"][0] == {"B": -0.25, "A": -a / 8}
    assert [len(top) for top in gateway.post_text(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"]] == [
        1
    ] * 3


def test_without_being_asked_for_there_are_none(gateway: Any) -> None:
    assert gateway.post().json()["choices"][0]["logprobs"] is None
    assert gateway.post_text().json()["choices"][0]["logprobs"] is None
    assert gateway.engine.requests[-1].logprobs is None

"""What the engine commits is what the client reads: whole or streamed, however the tokens were cut into commits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.types import DrafterVersion

pytestmark = pytest.mark.unit

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'


def accumulate(stream: Any) -> ChatCompletion:
    """What the openai client's own accumulator makes of a stream."""
    state: Any = ChatCompletionStreamState()
    for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.index is not None
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def essence(completion: Any) -> list[Any]:
    """Everything that must agree between two answers: all but the ids."""
    choices = []
    for choice in sorted(completion.choices, key=lambda choice: choice.index):
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        choices.append((choice.index, choice.message.role, choice.message.content, calls, choice.finish_reason))
    return choices


def both(gateway: Any, **fields: Any) -> tuple[ChatCompletion, ChatCompletion]:
    create = gateway.openai.chat.completions.create
    whole = create(**gateway.body(**fields))
    with create(**gateway.body(**fields), stream=True, stream_options={"include_usage": True}) as stream:
        streamed = accumulate(stream)
    assert essence(whole) == essence(streamed)
    assert whole.usage == streamed.usage
    return whole, streamed


def test_an_answer_has_everything_an_openai_client_expects(gateway: Any) -> None:
    whole, _ = both(gateway)
    assert essence(whole) == [(0, "assistant", "Hello there.", [], "stop")]
    assert whole.id.startswith("chatcmpl-")
    assert whole.object == "chat.completion"
    assert whole.model == "tiny"
    assert whole.system_fingerprint == "fp_0123456789ab"
    assert whole.usage is not None
    prompt = len(gateway.engine.requests[0].prompt_ids)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        prompt,
        13,
        prompt + 13,
    )


def test_the_prompt_is_the_rendered_conversation(gateway: Any, chat: ChatEncoder) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add 1 "}, {"type": "text", "text": "and 2."}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]  # fmt: skip
    assert gateway.post(messages=messages, tools=TOOLS).status_code == 200
    text = chat.tokenizer.decode(gateway.engine.requests[0].prompt_ids)
    for part in ("Be brief.", "Add 1 and 2.", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}', "3", '"add"'):
        assert part in text
    assert "None" not in text


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "missing"])
def test_a_tool_call_without_content_is_normal_and_renders_the_same(gateway: Any, content: dict[str, Any]) -> None:
    """Neither an error nor the word None (NVIDIA/NeMo-Agent-Toolkit 2077)."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    plain = [*history[:1], {**history[1], "content": ""}, *history[2:]]
    assert gateway.post(messages=history).status_code == 200
    assert gateway.post(messages=plain).status_code == 200
    first, second = gateway.engine.requests
    assert first.prompt_ids == second.prompt_ids


def test_our_own_answers_can_be_sent_back_as_the_client_holds_them(gateway: Any) -> None:
    gateway.engine.script = lambda request: gateway.engine.answer(CALL)
    message = gateway.openai.chat.completions.create(**gateway.body(tools=TOOLS)).choices[0].message
    assert message.content is None
    for sent in (message.model_dump(), message.model_dump(exclude_none=True)):
        reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        response = gateway.post(messages=[{"role": "user", "content": "Hi"}, sent, reply], tools=TOOLS)
        assert response.status_code == 200, response.text


def test_what_the_openai_client_parsed_can_be_sent_back_too(gateway: Any) -> None:
    gateway.engine.script = lambda request: gateway.engine.answer(CALL)
    parsed = gateway.openai.chat.completions.parse(**gateway.body(tools=[openai_tool(strict=True)])).choices[0].message
    reply = {"role": "tool", "tool_call_id": parsed.tool_calls[0].id, "content": "3"}
    gateway.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}, parsed, reply])


def openai_tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, **fields}}


def test_a_character_split_over_commits_arrives_whole(gateway: Any) -> None:
    engine = gateway.engine
    text = "naïve 🦊 日本語"
    ids = engine.ids(text)
    engine.script = lambda request: [*(engine.commit([id_]) for id_ in ids), *engine.answer()]
    whole, _ = both(gateway)
    assert whole.choices[0].message.content == text
    with gateway.openai.chat.completions.create(**gateway.body(), stream=True) as stream:
        pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("offset", range(16))
def test_a_stop_string_at_any_place_of_a_block_leaves_no_trace(gateway: Any, offset: int) -> None:
    """Also early in a block, and over several tokens or blocks (sglang 23802)."""
    engine = gateway.engine
    text = "0123456789abcdef"[:offset]
    ids = engine.ids(f"ST, STO! {text}STOP")
    for size in (1, 2, 3, 5, 16, 64):
        cuts = [ids[start : start + size] for start in range(0, len(ids), size)]
        commits = [engine.commit(cut) for cut in cuts[:-1]]
        last = engine.commit(cuts[-1], finish_reason="stop", text_end=len(f"ST, STO! {text}"))
        engine.script = lambda request, commits=commits, last=last: [*commits, last]
        whole, _ = both(gateway, stop=["STOP", "never"])
        assert whole.choices[0].message.content == f"ST, STO! {text}"
        assert whole.choices[0].finish_reason == "stop"


def test_text_that_only_began_like_a_stop_string_is_given_in_the_end(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = lambda request: engine.answer("Hello ST", "O", finish="length")
    whole, _ = both(gateway, stop="STOP")
    assert whole.choices[0].message.content == "Hello STO"
    assert whole.choices[0].finish_reason == "length"


def test_text_is_held_back_no_longer_than_needed(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = lambda request: engine.answer("Hello ST", "raw")
    with gateway.openai.chat.completions.create(**gateway.body(), stream=True, stop="STOP") as stream:
        pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert pieces == ["Hello ", "STraw"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tool_calls_arrive_complete_however_they_were_committed(gateway: Any, size: int) -> None:
    engine = gateway.engine
    ids = engine.ids(f"Let me see.\n{CALL}\n{CALL.replace('1', '7')}")
    engine.script = lambda request: [
        *(engine.commit(ids[start : start + size]) for start in range(0, len(ids), size)),
        *engine.answer(),
    ]
    whole, _ = both(gateway, tools=TOOLS)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert arguments == [{"a": 1, "b": [2, "é"]}, {"a": 7, "b": [2, "é"]}]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_tool_call_in_the_very_last_commit_is_complete(gateway: Any) -> None:
    """A speculative step can end an answer with a whole call; its arguments must not go missing (sglang 32167)."""
    engine = gateway.engine
    engine.script = lambda request: [
        engine.commit((*engine.ids(CALL), *engine.tokenizer.eos_ids), finish_reason="stop")
    ]
    whole, _ = both(gateway, tools=TOOLS)
    assert essence(whole) == [(0, "assistant", None, [("add", '{"a": 1, "b": [2, "é"]}')], "tool_calls")]


def test_calls_of_choices_that_take_turns_keep_their_indices_and_arguments(gateway: Any) -> None:
    """Every delta says which call it belongs to (openai-python 3246)."""
    engine = gateway.engine
    calls = [[f'<tool_call>{{"name": "add", "arguments": {{"a": {10 * c + i}}}}}</tool_call>' for i in range(3)]
             for c in range(2)]  # fmt: skip
    ids = [engine.ids("\n".join(texts)) for texts in calls]
    turns = [(c, start) for start in range(0, max(map(len, ids)), 5) for c in range(2)]
    engine.script = lambda request: [
        *(engine.commit(ids[c][start : start + 5], c) for c, start in turns),
        *(last for c in range(2) for last in engine.answer(choice=c)),
    ]
    whole, _ = both(gateway, n=2, tools=TOOLS)
    for c, choice in enumerate(whole.choices):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]
        assert arguments == [{"a": 10 * c + i} for i in range(3)]
    with gateway.openai.chat.completions.create(**gateway.body(n=2, tools=TOOLS), stream=True) as stream:
        deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in deltas if call.id] == [0, 0, 1, 1, 2, 2]
    assert all(call.function.name for call in deltas if call.id)


def test_what_a_model_thinks_is_content_word_for_word(gateway: Any) -> None:
    thought = "<think>\nHm, <b>2</b> & 2?\n</think>\n\nFour."
    gateway.engine.script = lambda request: gateway.engine.answer(thought[:9], thought[9:])
    whole, _ = both(gateway, tools=TOOLS)
    assert whole.choices[0].message.content == thought


def test_a_tool_call_cut_off_by_length_says_so(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = lambda request: engine.answer(CALL[:50], finish="length")
    whole, _ = both(gateway, tools=TOOLS)
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_tool_call_is_text(gateway: Any, fields: dict[str, Any]) -> None:
    gateway.engine.script = lambda request: gateway.engine.answer(CALL)
    whole, _ = both(gateway, **fields)
    assert essence(whole) == [(0, "assistant", CALL, [], "stop")]


def test_choices_are_kept_apart(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = lambda request: [
        engine.commit(engine.ids("one "), 0),
        engine.commit(engine.ids(CALL[:30]), 1),
        *engine.answer("uno", choice=0),
        engine.commit(engine.ids(CALL[30:]), 1),
        *engine.answer(choice=2, finish="length"),
        *engine.answer(choice=1),
    ]
    whole, _ = both(gateway, n=3, tools=TOOLS)
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "tool_calls", "length"]
    assert [choice.message.content for choice in whole.choices] == ["one uno", None, ""]


def test_usage_is_in_a_stream_only_when_asked_for_and_last(gateway: Any) -> None:
    create = gateway.openai.chat.completions.create
    assert all("usage" not in chunk.model_fields_set for chunk in create(**gateway.body(), stream=True))
    *chunks, last = create(**gateway.body(), stream=True, stream_options={"include_usage": True})
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 13


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
def test_statistics_come_when_asked_for_and_count_what_speculation_did(
    gateway: Any, step: Any, stream_options: Any
) -> None:
    engine = gateway.engine
    first, second = engine.ids("abcd"), engine.ids("ef")
    dflash = DrafterVersion("dflash", "v7")
    engine.script = lambda request: [
        engine.commit(engine.ids("x"), cached_tokens=5, seed=77),
        engine.commit(first, verify_step=step(first)),
        engine.commit(second, verify_step=step(second, drafted=(1, 2, 3, 4), block_length=3, drafter=dflash)),
        *engine.answer(),
    ]
    expected = {
        "session_id": "s1",
        "seed": 77,
        "accept_length": {"committed_tokens": 6, "verify_steps": 2},
        "drafted_tokens": 7,
        "verified_tokens": 6,
        "accepted_tokens": 4,
        "cached_tokens": 5,
        "drafters": [{"kind": "ngram", "version": "builtin"}, {"kind": "dflash", "version": "v7"}],
    }
    create = gateway.openai.with_options(default_headers={"X-Redraft-Session": "s1"}).chat.completions.create
    asked = {"extra_body": {"redraft": {"return_statistics": True}}}
    whole = create(**gateway.body(), **asked)
    assert whole.redraft == expected
    assert whole.usage.prompt_tokens_details.cached_tokens == 5
    *chunks, last = create(**gateway.body(), stream=True, stream_options=stream_options, **asked)
    assert last.redraft == expected
    assert not any(hasattr(chunk, "redraft") for chunk in chunks)
    assert not hasattr(create(**gateway.body()), "redraft")


def test_ids_and_sessions_are_returned(gateway: Any) -> None:
    post = gateway.http.post
    headers = {"x-request-id": "mine-1", "x-redraft-session": "s1", "x-redraft-agent": "coder"}
    for stream in (False, True):
        response = post("/v1/chat/completions", json=gateway.body(stream=stream), headers=headers)
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-redraft-session"] == "s1"
        request = gateway.engine.requests[-1]
        assert (request.session_id, request.agent_type) == ("s1", "coder")
        assert request.request_id in response.text
    forged = post("/v1/chat/completions", json=gateway.body(), headers={"x-request-id": "a b<script>"})
    assert forged.headers["x-request-id"].startswith("req-")


def test_models_are_listed_and_found(gateway: Any) -> None:
    assert [model.id for model in gateway.openai.models.list()] == ["tiny"]
    assert gateway.openai.models.retrieve("tiny").owned_by == "redraft"

"""A stream says what the whole answer says: for any parameters, any text, and any cut into commits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.types import Commit, GenerationRequest
from redraft.gateway.app import create_app
from redraft.gateway.config import GatewayConfig

pytestmark = pytest.mark.unit

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "sub", "strict": True, "parameters": {"type": "object"}}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
with_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)

text = st.text(max_size=12) | st.sampled_from([CALL, CALL[:40], "<tool", "_call>", "</tool_call>", "ST", "STO", "\n"])
maybe = st.none() | st.booleans()
shared_fields = st.fixed_dictionaries(
    {"redraft": st.just({"return_statistics": True})},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(-1, 1000),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(st.integers(0, 257).map(str), st.floats(-100, 100), max_size=3),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.sampled_from(["STOP", [], ["STOP"], ["\n", "STOP", "<tool_call>x"]]),
        "stop_token_ids": st.lists(st.integers(0, 257), max_size=2),
        "ignore_eos": maybe,
        "max_tokens": st.integers(1, 10_000),
        "user": st.text(max_size=3),
    },
)
chat_fields = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([TOOLS[:1], TOOLS]),
        "tool_choice": st.sampled_from(["auto", "none", None]),
        "parallel_tool_calls": maybe,
        "response_format": st.sampled_from(
            [
                None,
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            ]
        ),
        "logprobs": maybe,
    },
)
text_fields = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["Hi", ["Hi"], ["Hi", "you"], [72, 105], [[72], [105, 257]]])},
    optional={"echo": maybe, "logprobs": st.integers(0, 5)},
)


class InProcess:
    """A gateway without a server."""

    def __init__(self, engine: Any, chat: ChatEncoder) -> None:
        self.engine = engine
        self._app = create_app(GatewayConfig(), engine, chat)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return await client.post(path, json=body, headers={"x-redraft-session": "s"})

        response = asyncio.run(main())
        assert response.status_code == 200, response.text
        return response

    def both(self, path: str, fields: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """An answer whole, and the chunks of it as a stream."""
        body = {"model": "tiny", **fields}
        whole = self.post(path, body).json()
        streamed = self.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        *events, done, _ = streamed.text.split("\n\n")
        assert done == "data: [DONE]"
        return whole, [json.loads(event.removeprefix("data: ")) for event in events]

    def asked(self, count: int) -> list[GenerationRequest]:
        """The last requests that the engine got, without their ids."""
        return [msgspec.structs.replace(request, request_id="") for request in self.engine.requests[-count:]]


@pytest.fixture
def in_process(new_engine: Callable[[], Any], chat: ChatEncoder) -> InProcess:
    return InProcess(new_engine(), chat)


def draw_commits(data: st.DataObject, engine: Any, n: int, stop: tuple[str, ...]) -> list[list[Commit]]:
    """For each choice, its commits: a text with at most one stop string, cut anywhere."""
    commits = []
    for choice in range(n):
        said = "".join(data.draw(st.lists(text, max_size=6)))
        finish, text_end = data.draw(st.sampled_from(["stop", "length"])), None
        ends = [at + len(string) for string in stop if (at := said.find(string)) >= 0]
        if ends:
            said = said[: min(ends)]
            finish, text_end = "stop", min(at for string in stop if (at := said.find(string)) >= 0)
        ids = [*engine.ids(said), *(() if ends else engine.tokenizer.eos_ids)]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8)))
        pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        last = engine.commit(pieces[-1], choice, finish_reason=finish, text_end=text_end)
        commits.append([*(engine.commit(piece, choice) for piece in pieces[:-1]), last])
    return commits


def interleaved(data: st.DataObject, queues: list[list[Commit]]) -> list[Commit]:
    order = data.draw(st.permutations([number for number, queue in enumerate(queues) for _ in queue]))
    positions = [iter(queue) for queue in queues]
    return [next(positions[number]) for number in order]


def stops(fields: dict[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def said(engine: Any, queue: list[Commit]) -> str:
    ids = [id_ for commit in queue for id_ in commit.token_ids]
    return str(engine.tokenizer.decode(ids)[: queue[-1].text_end])


def without_ids(completion: ChatCompletion) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = sorted(completion.to_dict()["choices"], key=lambda choice: choice["index"])  # type: ignore[arg-type, index]
    for choice in choices:
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        choice["message"] = {key: value for key, value in choice["message"].items() if value is not None}
    return choices


@with_fixtures
@given(data=st.data(), shared=shared_fields, fields=chat_fields)
def test_whole_and_streamed_chat_answers_agree(
    in_process: InProcess, data: st.DataObject, shared: dict[str, Any], fields: dict[str, Any]
) -> None:
    n = data.draw(st.integers(1, 3))
    fields = shared | fields | {"n": n, "messages": [{"role": "user", "content": "Hi"}]}
    if fields.get("logprobs"):
        fields["top_logprobs"] = data.draw(st.integers(0, 20))
    queues = draw_commits(data, in_process.engine, n, stops(fields))
    script = interleaved(data, queues)
    in_process.engine.script = lambda request: script

    answer, events = in_process.both("/v1/chat/completions", fields)
    whole = ChatCompletion.model_validate(answer)
    state: Any = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    assert without_ids(whole) == without_ids(state.current_completion_snapshot)
    assert answer["usage"] == events[-1]["usage"]
    assert answer["redraft"] == events[-1]["redraft"]
    first, second = in_process.asked(2)
    assert first == second

    assert answer["usage"]["completion_tokens"] == sum(len(commit.token_ids) for queue in queues for commit in queue)
    for choice, queue in zip(answer["choices"], queues, strict=True):
        expected = said(in_process.engine, queue)
        content = choice["message"]["content"]
        assert choice["message"].get("tool_calls") or (content or "").strip() == expected.strip()
        if fields.get("logprobs"):
            entries = choice["logprobs"]["content"]
            assert b"".join(bytes(entry["bytes"] or ()) for entry in entries) == expected.encode()
            assert all(len(entry["top_logprobs"]) == fields["top_logprobs"] for entry in entries)
            if queue[-1].text_end is None:
                assert len(entries) == sum(len(commit.token_ids) for commit in queue)
        else:
            assert choice["logprobs"] is None


@with_fixtures
@given(data=st.data(), shared=shared_fields, fields=text_fields)
def test_whole_and_streamed_text_answers_agree(
    in_process: InProcess, data: st.DataObject, shared: dict[str, Any], fields: dict[str, Any]
) -> None:
    engine = in_process.engine
    if "logprobs" in fields:
        fields.pop("echo", None)
    n = data.draw(st.integers(1, 2))
    fields = shared | fields | {"n": n}
    prompts = 2 if fields["prompt"] in (["Hi", "you"], [[72], [105, 257]]) else 1
    queues = [draw_commits(data, engine, n, stops(fields)) for _ in range(prompts)]
    scripts = [interleaved(data, queue) for queue in queues]
    asked: list[tuple[int, ...]] = []

    def script(request: GenerationRequest) -> list[Commit]:
        if request.prompt_ids not in asked:
            asked.append(request.prompt_ids)
        return scripts[asked.index(request.prompt_ids)]

    engine.script = script
    answer, events = in_process.both("/v1/completions", fields)
    assert answer["usage"] == events[-1]["usage"]
    streamed: list[dict[str, Any]] = [
        {"text": "", "index": i, "logprobs": None, "finish_reason": None} for i in range(n * prompts)
    ]
    for event in events:
        for piece in event["choices"]:
            choice = streamed[piece["index"]]
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
            if piece["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {key: [] for key in piece["logprobs"]}
                for key, values in piece["logprobs"].items():
                    choice["logprobs"][key] += values
    empty = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in streamed:
        choice["logprobs"] = choice["logprobs"] or ("logprobs" in fields and empty) or None
    assert answer["choices"] == streamed
    if prompts == 1 or "seed" in fields:
        requests = in_process.asked(2 * prompts)
        assert sorted(requests[:prompts], key=str) == sorted(requests[prompts:], key=str)

    flat = [queue for group in queues for queue in group]
    for choice, queue in zip(answer["choices"], flat, strict=True):
        expected = said(engine, queue)
        assert choice["text"].endswith(expected)
        assert bool(fields.get("echo")) == (choice["text"] != expected)
        if "logprobs" in fields:
            assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
            assert all(offset <= len(expected) for offset in choice["logprobs"]["text_offset"])

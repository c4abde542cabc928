"""Prompts and responses: rendered as served, kept whatever happens, and gone on with."""

from __future__ import annotations

import asyncio
import json
import lzma
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.messages import Message
from redraft.engine.types import SamplingParams
from redraft.retrain.data import store
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.generate import (
    GREEDY,
    Answer,
    SglangResponder,
    make_prompts,
    respond_to_all,
    samplings,
)
from redraft.retrain.data.prompts import MAX_PROMPT_TOKENS, Prompts
from redraft.retrain.data.responses import Response
from redraft.retrain.data.splits import split_of

pytestmark = pytest.mark.unit

TARGET = "a" * 64


class Echo:
    """Answers with the end of the prompt; fails after ``patience`` answers."""

    def __init__(self, patience: int = 1_000_000, concurrency: int = 3) -> None:
        self.concurrency = concurrency
        self.asked = 0
        self._patience = patience

    async def respond(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> Answer:
        self.asked += 1
        if self.asked > self._patience:
            raise DataError("the server is gone")
        await asyncio.sleep(0)
        return (*prompt_ids[-4:], sampling.seed or 0), "stop"


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    make_prompts(
        tmp_path / "data",
        tiny_checkpoint,
        model="tiny",
        sources=("code",),
        command="redraft data generate",
        commit=None,
    )
    return tmp_path / "data"


def test_prompts_are_what_serving_renders(folder: Path, tiny_checkpoint: Path) -> None:
    encoder = ChatEncoder.from_folder(tiny_checkpoint)
    sessions = {conversation.id: conversation for conversation in store.load_conversations(folder)}
    prompts = list(store.load_prompts(folder))
    assert len(prompts) == 164
    for prompt in prompts:
        session = sessions[prompt.session]
        assert prompt.ids == encoder.encode_chat(session.messages[: prompt.turn], session.tools)
        assert prompt.split == split_of(session.source, session.family)


def test_long_sessions_are_cut_and_counted_and_equal_prompts_asked_once(tiny_checkpoint: Path) -> None:
    encoder = ChatEncoder.from_folder(tiny_checkpoint)
    long = "x" * MAX_PROMPT_TOKENS
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", long), Message("assistant", "c"))
    sessions = [Conversation(name, "plain", "f", (), turns) for name in ("one", "two")]
    prompts = Prompts(encoder, sessions)
    assert [(prompt.session, prompt.turn) for prompt in prompts] == [("one", 1)]
    assert (prompts.cut, prompts.repeated) == (2, 1)


def test_every_prompt_is_answered_greedily_and_at_random(folder: Path) -> None:
    manifest = asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=2))
    samples = list(store.load_samples(folder))
    assert len(samples) == manifest.responses == 3 * 164
    assert sum(sample.greedy for sample in samples) == 164
    assert manifest.target == TARGET
    prompts = {prompt.id: prompt for prompt in store.load_prompts(folder)}
    for sample in samples:
        ((start, end),) = sample.spans
        assert sample.token_ids[:start] == prompts[sample.id.rpartition("/")[0]].ids
        assert end == len(sample.token_ids) == start + 5
    seeds = [response.sampling.seed for response in store.load_responses(folder)]
    assert len({seed for seed in seeds if seed is not None}) == 2 * 164
    store.verify(folder)


def test_one_source_can_be_answered_more_often_than_the_folder(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "two"
    make_prompts(folder, tiny_checkpoint, model="tiny", sources=("code", "math"), command="", commit=None)
    asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=0))
    manifest = asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=1, sources=("code",)))
    answers = Counter(sample.source for sample in store.load_samples(folder))
    asked = Counter(prompt.source for prompt in store.load_prompts(folder))
    assert answers == {"code": 2 * asked["code"], "math": asked["math"]}
    assert manifest.sampled == 0
    with pytest.raises(DataError, match="holds the sources code, math, not plain"):
        asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=1, sources=("plain",)))


def test_splits_are_read_apart(folder: Path) -> None:
    asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=0))
    test = list(store.load_samples(folder, ("test",)))
    rest = list(store.load_samples(folder, ("train", "calibrate", "gate", "anchor")))
    assert {sample.split for sample in test} == {"test"}
    assert len(test) + len(rest) == 164
    assert not {sample.family for sample in test} & {sample.family for sample in rest}


def test_what_was_answered_before_a_failure_is_kept_and_not_asked_again(folder: Path) -> None:
    with pytest.raises(DataError, match="the server is gone"):
        asyncio.run(respond_to_all(folder, Echo(patience=50), target=TARGET, sampled=1))
    kept = list(store.load_responses(folder))
    assert 45 <= len(kept) <= 50
    again = Echo()
    manifest = asyncio.run(respond_to_all(folder, again, target=TARGET, sampled=1))
    assert again.asked == 2 * 164 - len(kept)
    assert manifest.responses == 2 * 164
    assert len({response.key for response in store.load_responses(folder)}) == 2 * 164


def test_cancelling_keeps_what_is_done(folder: Path) -> None:
    async def cancelled() -> None:
        reached = asyncio.Event()

        def progress(done: int, total: int) -> None:
            if done == 30:
                reached.set()

        task = asyncio.create_task(respond_to_all(folder, Echo(), target=TARGET, sampled=0, progress=progress))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert 30 <= len(list(store.load_responses(folder))) < 164
    store.verify(folder)


def test_a_killed_process_loses_at_most_the_line_it_was_writing(folder: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from redraft.retrain.data.responses import Response\n"
        "from redraft.retrain.data.store import ResponseWriter\n"
        "from redraft.retrain.data.generate import GREEDY\n"
        "writer = ResponseWriter(pathlib.Path(sys.argv[1]))\n"
        "for i in range(3): writer.add(Response(f'p:{i}', GREEDY, (1, 2), 'stop', False))\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)]).returncode == 9
    answers = [Response(f"p:{i}", GREEDY, (1, 2), "stop", False) for i in range(4)]
    partial = folder / "responses.partial.jsonl"
    partial.write_bytes(partial.read_bytes() + b'{"prompt": "p:3", "sam')
    assert list(store.load_responses(folder)) == answers[:3]
    writer = store.ResponseWriter(folder)
    writer.add(answers[3])
    torn = partial.read_bytes()
    writer.close()
    assert list(store.load_responses(folder)) == answers
    partial.write_bytes(torn)  # as if it had been killed after the shard was there
    assert list(store.load_responses(folder)) == answers


def test_answers_that_the_manifest_does_not_know_are_not_learnt_from_unseen(folder: Path) -> None:
    asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=0))
    writer = store.ResponseWriter(folder)
    writer.add(Response("p:1", GREEDY, (1, 2), "stop", False))
    with pytest.raises(DataError, match="finish it: redraft data generate"):
        store.verify(folder)
    writer.close()
    with pytest.raises(DataError, match="finish it: redraft data generate"):
        store.verify(folder)
    store.save_manifest(folder, store.load_manifest(folder))
    store.verify(folder)
    (folder / "responses.partial.jsonl").write_bytes(b"{}\n")
    with pytest.raises(DataError, match=r"responses\.partial\.jsonl is damaged"):
        list(store.load_responses(folder))


def test_answers_of_two_models_do_not_mix(folder: Path) -> None:
    asyncio.run(respond_to_all(folder, Echo(), target=TARGET, sampled=0))
    with pytest.raises(DataError, match="another model"):
        asyncio.run(respond_to_all(folder, Echo(), target="b" * 64, sampled=0))


def test_a_folder_belongs_to_nobody_until_somebody_answered(folder: Path) -> None:
    before = store.load_manifest(folder)
    with pytest.raises(DataError, match="the server is gone"):
        asyncio.run(respond_to_all(folder, Echo(patience=0), target=TARGET, sampled=3))
    assert store.load_manifest(folder) == before
    assert asyncio.run(respond_to_all(folder, Echo(), target="b" * 64, sampled=0)).target == "b" * 64


def test_looping_answers_are_marked(folder: Path) -> None:
    class Loops(Echo):
        async def respond(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> Answer:
            return (7,) * max_tokens, "length"

    manifest = asyncio.run(respond_to_all(folder, Loops(), target=TARGET, sampled=0))
    assert manifest.looping_share == 1
    assert all(sample.looping for sample in store.load_samples(folder))


def test_damage_is_named(folder: Path) -> None:
    file = folder / "prompts.jsonl.xz"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"prompts.jsonl.xz is not the file that was made \(changed\)"):
        store.verify(folder)
    with pytest.raises(DataError, match=r"prompts.jsonl.xz is damaged"):
        list(store.load_prompts(folder))
    file.write_bytes(lzma.compress(b'{"id": 1}\n'))
    with pytest.raises(DataError, match=r"prompts.jsonl.xz is damaged"):
        list(store.load_prompts(folder))
    with pytest.raises(DataError, match="holds no training data"):
        store.load_manifest(folder.parent)


@contextmanager
def sglang_server(reply: Callable[[dict[str, Any]], tuple[int, Any] | None]) -> Iterator[str]:
    """A server of canned replies; None hangs up without one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/generate"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = reply(body)
            if found is None:
                self.close_connection = True
                return
            status, answer = found
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(url: str, sampling: SamplingParams) -> Answer:
    async def answered() -> Answer:
        responder = SglangResponder(url, concurrency=2)
        try:
            return await responder.respond((1, 2, 3), sampling, 9)
        finally:
            await responder.close()

    return asyncio.run(answered())


def test_only_one_process_writes_into_a_folder(tmp_path: Path) -> None:
    writer = store.ResponseWriter(tmp_path)
    with pytest.raises(DataError, match="being written by another process"):
        store.ResponseWriter(tmp_path)
    writer.close()
    store.ResponseWriter(tmp_path).close()


@pytest.mark.parametrize(("hang_ups", "answered"), [(1, True), (4, True), (5, False)])
def test_sglang_is_asked_again_when_it_hangs_up(hang_ups: int, answered: bool) -> None:
    asked = iter(range(100))

    def reply(body: dict[str, Any]) -> tuple[int, Any] | None:
        meta = {"finish_reason": {"type": "length", "length": 1}}
        return None if next(asked) < hang_ups else (200, {"output_ids": [5], "meta_info": meta})

    with sglang_server(reply) as url:
        if answered:
            assert ask(url, GREEDY) == ((5,), "length")
        else:
            with pytest.raises(DataError, match="does not answer"):
                ask(url, GREEDY)


def test_sglang_is_asked_with_ids_and_answers_with_ids() -> None:
    asked: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        finish = {"type": "stop", "matched": 2} if len(asked) < 3 else {"type": "length", "length": 9}
        return 200, {
            "text": "",
            "output_ids": [5, 6] if len(asked) == 1 else [5, 2],
            "meta_info": {"finish_reason": finish},
        }

    with sglang_server(reply) as url:
        sampled = samplings("p", 1)[1]
        assert ask(url, GREEDY) == ((5, 6, 2), "stop")
        assert ask(url, sampled) == ((5, 2), "stop")
        assert ask(url, sampled) == ((5, 2), "length")
    assert asked[0] == {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
    wanted = {"temperature": 0.7, "top_p": 0.95, "max_new_tokens": 9, "sampling_seed": sampled.seed}
    assert asked[1]["sampling_params"] == wanted


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, {"error": "too long"}, "refused a prompt: 400"),
        (200, {"ids": []}, "does not answer as SGLang"),
        (200, {"output_ids": [1], "meta_info": {"finish_reason": None}}, "does not answer as SGLang"),
    ],
)
def test_a_server_that_fails_is_one_line(status: int, answer: Any, message: str) -> None:
    with sglang_server(lambda body: (status, answer)) as url, pytest.raises(DataError, match=message) as raised:
        ask(url, GREEDY)
    assert "\n" not in str(raised.value)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with sglang_server(lambda body: (200, {})) as url:
        pass
    with pytest.raises(DataError, match="does not answer"):
        ask(url, GREEDY)


@pytest.mark.parametrize(
    "url", ["", "localhost:30000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://["]
)
def test_what_is_no_url_of_a_server_is_one_line(url: str) -> None:
    with pytest.raises(DataError, match="is not the URL of a server"):
        SglangResponder(url)


def test_a_folder_that_cannot_be_made_is_told_before_rendering(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_prompts(tmp_path / "file", tmp_path / "no-model", model="tiny", sources=(), command="", commit=None)


def test_reading_a_folder_and_asking_a_server_need_few_libraries() -> None:
    code = (
        "import sys, redraft.retrain.data.store, redraft.retrain.data.generate\n"
        "few = {'torch', 'pydantic', 'typer', 'platformdirs', 'tokenizers', 'jinja2', 'bfcl_eval', 'gguf'}\n"
        "assert not few & set(sys.modules), few & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

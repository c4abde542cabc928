"""A gateway on loopback in front of an engine that does as it is told, to inject faults and timing."""

from __future__ import annotations

import asyncio
import importlib.resources
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.renderer import Renderer
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.policy.cost import CostGrid, CostTable
from redraft.engine.types import (
    Capabilities,
    Commit,
    DrafterPointer,
    DrafterVersion,
    GenerationRequest,
    Health,
    SpeculationScope,
    TokenLogprob,
    VerifyStep,
)
from redraft.gateway.app import create_app
from redraft.gateway.config import GatewayConfig
from redraft.gateway.server import bind, make_server

MODEL = "tiny"
HANG = object()
CONTEXT = 4096
PARAMETERS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "n"),
    }
)


class ScriptedEngine:
    """Plays a script for each request: commits are yielded, exceptions raised, events awaited, ``HANG`` for ever.

    ``hanging`` and ``closed`` tell a test in another thread that a request hangs, and that one has been let go.
    """

    def __init__(self, tokenizer: Tokenizer, parameters: frozenset[str] = PARAMETERS) -> None:
        self.tokenizer = tokenizer
        self.parameters = parameters
        self.able = True
        self.max_prompt_tokens = CONTEXT - 1
        self.shut = False
        self.reset()

    def reset(self) -> None:
        self.script: Callable[[GenerationRequest], Iterable[Any]] = self.hello
        self.requests: list[GenerationRequest] = []
        self.hanging = threading.Event()
        self.closed = threading.Event()
        self.state = Health(ready=True, running=1, waiting=2, kv_used_bytes=3, kv_budget_bytes=4)
        self.fault: Exception | None = None
        self.mute = False
        self.running = 0

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_ordinary(text))

    def commit(self, ids: Iterable[int], choice: int = 0, **fields: Any) -> Commit:
        return Commit(request_id="", choice=choice, token_ids=tuple(ids), **fields)

    def answer(self, *texts: str, choice: int = 0, finish: Any = "stop", **last: Any) -> list[Commit]:
        """One commit for each text, then one with the end token."""
        commits = [self.commit(self.ids(text), choice) for text in texts]
        end = self.commit(self.tokenizer.eos_ids, choice, finish_reason=finish, **last)
        return [*commits, end]

    def hello(self, request: GenerationRequest) -> list[Commit]:
        return [commit for choice in range(request.n) for commit in self.answer("Hello there.", choice=choice)]

    def scored(self, commit: Commit, request: GenerationRequest) -> Commit:
        """Log-probabilities where they were asked for; the alternatives to token i are i + 1, i + 2, …"""
        if request.logprobs is None:
            return commit
        alternatives = range(1, request.logprobs + 1)
        logprobs = tuple(
            TokenLogprob(-id_ / 8, tuple(((id_ + i) % self.tokenizer.vocab_size, -i / 4.0) for i in alternatives))
            for id_ in commit.token_ids
        )
        return msgspec.structs.replace(commit, logprobs=logprobs)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit]:
        self.requests.append(request)
        self.running += 1
        try:
            for action in self.script(request):
                if isinstance(action, Exception):
                    raise action
                if action is HANG:
                    self.hanging.set()
                    await asyncio.get_running_loop().create_future()
                if isinstance(action, asyncio.Event):
                    await action.wait()
                else:
                    yield self.scored(action, request)
        finally:
            await asyncio.sleep(0)  # freeing takes a moment, as it does over a socket
            self.running -= 1
            self.closed.set()

    async def capabilities(self) -> Capabilities:
        await self._maybe_fail()
        return Capabilities(
            target="sha256:0123456789abcdef",
            model_name=MODEL,
            context_length=CONTEXT,
            vocab_size=self.tokenizer.vocab_size,
            max_prompt_tokens=self.max_prompt_tokens,
            lossless="invariant",
            parameters=self.parameters,
            constrained_decoding=self.able,
            logprobs=self.able,
            hot_swap=False,
            telemetry=True,
            draft_prob=False,
        )

    async def health(self) -> Health:
        await self._maybe_fail()
        return self.state

    async def _maybe_fail(self) -> None:
        if self.mute:
            await asyncio.get_running_loop().create_future()
        if self.fault is not None:
            raise self.fault

    async def abort(self, request_id: str) -> None: ...

    async def load_drafter(self, version: DrafterVersion, path: Path) -> None: ...

    async def activate(self, pointer: DrafterPointer) -> None: ...

    async def set_speculation(self, scope: SpeculationScope, on: bool) -> None: ...

    async def costs(self) -> CostTable:
        return CostTable(verify=CostGrid((512,), (1,), ((20.0,),)), draft={})

    async def close(self) -> None:
        self.shut = True


def verify_step(committed: Iterable[int], **fields: Any) -> VerifyStep:
    committed = tuple(committed)
    defaults: dict[str, Any] = {
        "request_id": "",
        "choice": 0,
        "position": 10,
        "drafted": committed[:-1],
        "draft_prob": None,
        "match_length": 2,
        "block_length": len(committed) - 1,
        "accepted": len(committed) - 1,
        "committed": committed,
        "explored": False,
        "batch_size": 1,
        "total_rows": len(committed),
        "draft_ms": 0.1,
        "verify_ms": 1.0,
        "target_entropy": None,
        "drafter": DrafterVersion("ngram", "builtin"),
        "target": "sha256:0123456789abcdef",
        "cached_tokens": 0,
    }
    return VerifyStep(**{**defaults, **fields})


class Running:
    """A served gateway, its engine, and clients of it."""

    def __init__(self, port: int, engine: ScriptedEngine, server: uvicorn.Server, thread: threading.Thread) -> None:
        self.server = server
        self.thread = thread
        self.port = port
        self.engine = engine
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20)
        self.openai = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=20, http_client=self._client()
        )

    def _client(self) -> httpx.Client:
        return httpx.Client(trust_env=False)

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=self.body(**fields))

    def text_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "Hi", **fields}

    def post_text(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=self.text_body(**fields))

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def close(self) -> None:
        self.http.close()
        self.openai.close()


@contextmanager
def serving(app: Any, engine: ScriptedEngine) -> Iterator[Running]:
    sock = bind("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    running = Running(sock.getsockname()[1], engine, server, thread)
    try:
        yield running
    finally:
        running.close()
        server.should_exit = True
        thread.join(20)
        sock.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def chat() -> ChatEncoder:
    """A tokenizer of one token a byte, and the template of the default model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = importlib.resources.files("redraft.engine.chat").joinpath("smollm2.jinja").read_text()
    return ChatEncoder(Renderer(template), Tokenizer(tokenizer.to_str(), (257,)))


@pytest.fixture(scope="session")
def new_engine(chat: ChatEncoder) -> Callable[[], ScriptedEngine]:
    """Makes engines without a gateway."""
    return lambda: ScriptedEngine(chat.tokenizer)


@pytest.fixture
def scripted(new_engine: Callable[[], ScriptedEngine]) -> ScriptedEngine:
    return new_engine()


@pytest.fixture
def step() -> Callable[..., VerifyStep]:
    return verify_step


@pytest.fixture
def hang() -> object:
    return HANG


@pytest.fixture(scope="session")
def served(chat: ChatEncoder) -> Iterator[Running]:
    engine = ScriptedEngine(chat.tokenizer)
    with serving(create_app(GatewayConfig(max_body_bytes=1 << 20), engine, chat), engine) as running:
        yield running


@pytest.fixture
def gateway(served: Running) -> Running:
    """A gateway that other tests have used, its engine as new."""
    served.engine.reset()
    return served


@pytest.fixture
def serve(chat: ChatEncoder) -> Iterator[Callable[..., Running]]:
    """Serves gateways of one's own, configured by keyword."""
    with ExitStack() as stack:

        def start(*, parameters: frozenset[str] = PARAMETERS, **config: Any) -> Running:
            engine = ScriptedEngine(chat.tokenizer, parameters)
            return stack.enter_context(serving(create_app(GatewayConfig(**config), engine, chat), engine))

        yield start

"""What each route does."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.protocol import Engine, EngineError, EngineUnavailable
from redraft.engine.types import Capabilities, GenerationRequest, Health, Principal
from redraft.feedback.metrics import CONTENT_TYPE, ServingMetrics
from redraft.feedback.recorder import Recorder
from redraft.gateway.answer import Answer
from redraft.gateway.auth import resolve_principal
from redraft.gateway.chat_completions import ChatAnswer
from redraft.gateway.completion import Completion
from redraft.gateway.config import GatewayConfig
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.generation import check_model
from redraft.gateway.prompt import Prepared, prepare_chat, prepare_text
from redraft.gateway.response import Model, ModelList, Status
from redraft.gateway.sessions import Sessions, message_chain, new_session_id
from redraft.gateway.text_completions import TextAnswer
from redraft.gateway.tokenization import detokenize, tokenize
from redraft.gateway.transport import EventStream, JSONResponse, read_body, until_disconnect

T = TypeVar("T")

SESSION_HEADER = "x-redraft-session"
AGENT_HEADER = "x-redraft-agent"
ENGINE_SECONDS = 2.0
ALIVE_SECONDS = 0.5
INLINE_BODY_BYTES = 16 << 10

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Gateway:
    """The routes' handlers, and what they share: the engine, its capabilities, the sessions, the metrics."""

    def __init__(self, config: GatewayConfig, engine: Engine, chat: ChatEncoder, recorder: Recorder | None) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat
        self._recorder = recorder
        self._started = int(time.time())
        self._known_capabilities: Capabilities | None = None
        self._sessions = Sessions(config.session_idle_seconds, config.max_sessions)
        self.metrics = ServingMetrics()
        if recorder is not None:
            self.metrics.registry.register(recorder.metrics.registry)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation, at once or as a stream of chunks."""
        prepare = partial(prepare_chat, default_max_tokens=self._config.default_max_tokens)
        return await self._complete(request, prepare, ChatAnswer)

    async def text_completions(self, request: Request) -> Response:
        """Continue texts, at once or as a stream of chunks."""
        return await self._complete(request, prepare_text, TextAnswer)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or of a conversation."""
        return JSONResponse(await self._prepare(request, tokenize))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return JSONResponse(await self._prepare(request, detokenize))

    async def models(self) -> Response:
        """The one model served."""
        return JSONResponse(ModelList(data=[self._model(await self._capabilities())]))

    async def model(self, model: str) -> Response:
        """The model served, by its name."""
        capabilities = await self._capabilities()
        check_model(model, capabilities)
        return JSONResponse(self._model(capabilities))

    async def health(self) -> Response:
        """The gateway is alive, whatever its engine does; what is wrong with that is told in words."""
        return JSONResponse(Status("ok", (await self._engine_health(ALIVE_SECONDS)).detail))

    async def ready(self) -> Response:
        """Requests can be answered now; if not, a 503 says why."""
        health = await self._engine_health(ENGINE_SECONDS)
        if not health.ready:
            raise EngineUnavailable(health.detail or "The engine is not ready.")
        await self._capabilities()
        return JSONResponse(Status("ready", health.detail))

    async def scrape(self) -> Response:
        """Metrics in Prometheus's text format."""
        return Response(self.metrics.render(await self._engine_health(ENGINE_SECONDS)), media_type=CONTENT_TYPE)

    async def _complete(
        self,
        request: Request,
        prepare: Callable[[bytes, ChatEncoder, Capabilities], Prepared],
        protocol: type[Answer],
    ) -> Response:
        started = time.perf_counter()
        principal = resolve_principal(request.headers)
        agent_type = _name(request.headers, AGENT_HEADER) or "default"
        named_session = _name(request.headers, SESSION_HEADER)
        prepared = await self._prepare(request, prepare)
        if prepared.grammar is not None:
            await asyncio.to_thread(prepared.grammar.check)
        session_id = self._enter_session(principal, named_session, prepared)
        id_ = f"{protocol.id_prefix}-{uuid.uuid4().hex}"
        generation = prepared.generation
        requests = [
            GenerationRequest(
                request_id=f"{id_}-{number}" if number else id_,
                prompt_ids=prompt.token_ids,
                stopping=prompt.stopping,
                sampling=generation.sampling,
                n=generation.n,
                logprobs=generation.logprobs,
                constraint=prepared.grammar.constraint if prepared.grammar else None,
                speculation=generation.speculation,
                principal=principal,
                agent_type=agent_type,
                session_id=session_id,
            )
            for number, prompt in enumerate(prepared.prompts)
        ]

        def remember_answer(completion: Completion) -> None:
            if prepared.end is not None:
                links = [message_chain([choice.message()], prepared.end)[0] for choice in completion.choices]
                self._sessions.remember(principal.tenant, session_id, links)

        capabilities = await self._capabilities()
        recorder = self._recorder
        completion = Completion(
            self._engine,
            requests,
            self._chat.tokenizer,
            self.metrics,
            tools=prepared.tools,
            started=started,
            on_finish=remember_answer,
            recordings=[
                recorder.recording(request, choice, capabilities.target)
                for request in requests
                for choice in range(request.n)
            ]
            if recorder
            else (),
        )
        answer = protocol(id_, completion, prepared, capabilities)
        headers = {SESSION_HEADER: session_id}
        if generation.stream:
            return EventStream(answer.chunks(), request.state.request_id, headers)
        return JSONResponse(await until_disconnect(request.receive, answer.completed()), headers=headers)

    async def _prepare(self, request: Request, prepare: Callable[[bytes, ChatEncoder, Capabilities], T]) -> T:
        """Read a body and make of it what ``prepare`` does; large ones leave the event loop to others meanwhile."""
        body = await read_body(request.receive, request.headers, self._config.max_body_bytes)
        arguments = (body, self._chat, await self._capabilities())
        return prepare(*arguments) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(prepare, *arguments)

    def _enter_session(self, principal: Principal, named: str | None, prompt: Prepared) -> str:
        session_id = named or self._sessions.find(principal.tenant, prompt.links) or new_session_id()
        self._sessions.remember(principal.tenant, session_id, prompt.links[-1:])
        return session_id

    def _model(self, capabilities: Capabilities) -> Model:
        return Model(id=capabilities.model_name, created=self._started)

    async def _capabilities(self) -> Capabilities:
        if self._known_capabilities is None:
            try:
                async with asyncio.timeout(ENGINE_SECONDS):
                    self._known_capabilities = await self._engine.capabilities()
            except TimeoutError as exc:
                raise EngineUnavailable(f"The engine did not answer within {ENGINE_SECONDS:g} seconds.") from exc
        return self._known_capabilities

    async def _engine_health(self, seconds: float) -> Health:
        try:
            async with asyncio.timeout(seconds):
                return await self._engine.health()
        except TimeoutError:
            return Health(ready=False, detail=f"The engine did not answer within {seconds:g} seconds.")
        except EngineError as exc:
            return Health(ready=False, detail=str(exc))


def _name(headers: Mapping[str, str], header: str) -> str | None:
    value = headers.get(header)
    if value is not None and not _NAME.fullmatch(value):
        message = f"The header {header} takes 1 to 64 letters, digits, and any of . _ : and -."
        raise InvalidRequest(message, header)
    return value

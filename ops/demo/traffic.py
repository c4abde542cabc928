"""Agents at work: sessions of a scenario, sent turn by turn over HTTP to a deployment, in closed loop."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from msgspec import Struct

from redraft.engine.chat.messages import Message, Tool
from redraft.gateway.service import AGENT_HEADER, SESSION_HEADER
from redraft.retrain.data.conversation import Conversation

TURN_SECONDS = 120.0
"""For one answer; longer counts as failed."""


class TurnResult(Struct, frozen=True, kw_only=True):
    """One request as its client saw it; times in seconds, ``started`` since the epoch.

    ``tpot`` is None where an answer had fewer than two tokens. ``error`` is None where it was answered.
    """

    session: str
    turn: int
    started: float
    ttft: float | None = None
    tpot: float | None = None
    tokens: int = 0
    error: str | None = None


class Client:
    """Asks a deployment at ``url``, greedily; ``agent`` goes along as the agent type.

    Log-probabilities are asked for because with them every commit is a chunk of its own, which times can be read off.
    """

    def __init__(
        self,
        url: str,
        model: str,
        agent: str,
        max_tokens: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=TURN_SECONDS, trust_env=False, transport=transport)
        self._model = model
        self._agent = agent
        self._max_tokens = max_tokens

    async def close(self) -> None:
        await self._http.aclose()

    async def session(self, session: Conversation, name: str, turns: int) -> AsyncIterator[TurnResult]:
        """Ask for a session's first ``turns``; its history is forced, so that one answer does not change the next."""
        for turn in session.asked_turns[:turns]:
            body = {
                "model": self._model,
                "messages": [_message(message) for message in session.messages[:turn]],
                "tools": [_tool(tool) for tool in session.tools],
                "temperature": 0,
                "max_tokens": self._max_tokens,
                "logprobs": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            yield await self._turn(body, name, turn)

    async def _turn(self, body: dict[str, Any], name: str, turn: int) -> TurnResult:
        started, begun = time.time(), time.perf_counter()
        first = last = None
        tokens = 0
        try:
            async with asyncio.timeout(TURN_SECONDS), self._answer(body, name) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return TurnResult(session=name, turn=turn, started=started, error=str(chunk["error"]))
                    if chunk.get("usage"):
                        tokens = chunk["usage"]["completion_tokens"]
                    elif chunk["choices"]:
                        last = time.perf_counter()
                        first = first or last
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
            return TurnResult(session=name, turn=turn, started=started, error=f"{type(error).__name__}: {error}")
        if first is None or last is None or not tokens:
            return TurnResult(session=name, turn=turn, started=started, error="the answer broke off")
        tpot = (last - first) / (tokens - 1) if tokens > 1 else None
        return TurnResult(session=name, turn=turn, started=started, ttft=first - begun, tpot=tpot, tokens=tokens)

    @asynccontextmanager
    async def _answer(self, body: dict[str, Any], name: str) -> AsyncIterator[httpx.Response]:
        headers = {SESSION_HEADER: name, AGENT_HEADER: self._agent}
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise httpx.HTTPStatusError(
                    f"{response.status_code} {text[:200]}", request=response.request, response=response
                )
            yield response


async def drive(
    client: Client,
    sessions: Iterator[tuple[str, Conversation]],
    *,
    concurrency: int,
    turns: int,
    think: float,
    report: Callable[[TurnResult], None],
    go_on: Callable[[], bool],
) -> None:
    """Run named sessions, ``concurrency`` at a time, until there are no more or ``go_on`` says no between two.

    Before each request but its first an agent thinks, for exponential times of ``think`` seconds on average.
    """

    async def agent(number: int) -> None:
        thinks = random.Random(number)  # noqa: S311
        while go_on() and (following := next(sessions, None)):
            name, session = following
            async for result in client.session(session, name, turns):
                report(result)
                if think:
                    await asyncio.sleep(thinks.expovariate(1 / think))

    await asyncio.gather(*(agent(number) for number in range(concurrency)))


def _message(message: Message) -> dict[str, Any]:
    """In the chat API's shape."""
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }

"""One request on its way through the engine: text and tool calls out of committed tokens, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

from redraft.engine.chat.messages import Message, ToolCall
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.chat.tool_calls import ContentDelta, ToolCallDelta, ToolCallParser
from redraft.engine.protocol import Engine, EngineUnavailable
from redraft.engine.types import AcceptLength, Commit, DrafterVersion, GenerationRequest, TokenLogprob
from redraft.feedback.metrics import ServingMetrics
from redraft.feedback.recorder import Recording
from redraft.gateway.response import FinishReason

AnswerDelta = ContentDelta | ToolCallDelta

PROMPTS_AT_ONCE = 8


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer, the character of the answer's text at which it begins, and its log-probability."""

    id: int
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True)
class Step:
    """What one commit added to one choice; a choice's last step carries ``finish_reason``.

    ``logprobs`` are those of the tokens whose text has now been given, where the request asked for them.
    """

    choice: int
    deltas: list[AnswerDelta]
    logprobs: list[ScoredToken]
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ContentDelta))


@dataclass
class Tally:
    """What speculation did for a request, summed over its verify steps; ``drafters`` in order of appearance."""

    accept_length: AcceptLength = field(default_factory=AcceptLength)
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    drafters: list[DrafterVersion] = field(default_factory=list)


class StopBuffer:
    """Lets text through, except an ending that may yet turn out to be the start of a stop string."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stop_strings = stop_strings
        self._held = ""
        self.released = 0

    def push(self, text: str) -> str:
        text = self._held + text
        return self._release(text, len(text) - max((_overlap(text, stop) for stop in self._stop_strings), default=0))

    def finish(self, text: str, text_end: int | None) -> str:
        """The rest of the answer: all of it, or up to ``text_end`` characters from the answer's beginning."""
        text = self._held + text
        return self._release(text, len(text) if text_end is None else max(text_end - self.released, 0))

    def _release(self, text: str, end: int) -> str:
        released, self._held = text[:end], text[end:]
        self.released += len(released)
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Choice:
    """One choice of an answer, assembled commit by commit."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...], tools: bool) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopBuffer(stop_strings)
        self._parser = ToolCallParser() if tools else None
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._unscored: deque[ScoredToken] = deque()
        self._text_length = 0
        self.logprobs: list[ScoredToken] = []
        self.tokens = 0
        self.first_at = 0.0
        self.last_at = 0.0
        self.finish_reason: FinishReason | None = None

    def push(self, number: int, commit: Commit, now: float) -> Step:
        """Take a commit of this choice, which is number ``number`` of the answer."""
        self.first_at = self.first_at or now
        self.last_at = now
        self.tokens += len(commit.token_ids)
        text = self._read(commit)
        if commit.finish_reason is None:
            deltas = self._parse(self._stops.push(text))
        else:
            deltas = self._parse(self._stops.finish(text + self._detokenizer.finish(), commit.text_end))
            deltas += self._parser.finish() if self._parser else []
        for delta in deltas:
            self._keep(delta)
        logprobs = self._released_logprobs(whole=commit.finish_reason is not None and commit.text_end is None)
        self.logprobs += logprobs
        match commit.finish_reason:
            case "stop":
                self.finish_reason = "tool_calls" if self._calls else "stop"
            case "length":
                self.finish_reason = "length"
            case "abort":
                raise EngineUnavailable("The engine gave this request up before its answer was complete; try again.")
        return Step(number, deltas, logprobs, self.finish_reason)

    @property
    def text(self) -> str:
        """What is no tool call."""
        return "".join(self._content)

    @property
    def is_empty(self) -> bool:
        return not self._content and not self._calls

    def message(self) -> Message:
        """The assistant's message; ``content`` is None where there are tool calls and no text."""
        content = self.text
        calls = tuple(ToolCall(id_, name, "".join(arguments)) for id_, name, arguments in self._calls)
        return Message("assistant", content if content or not calls else None, calls)

    def _read(self, commit: Commit) -> str:
        """The text that has become certain; remembers where scored tokens begin in it."""
        if commit.logprobs is None:
            return self._detokenizer.push(commit.token_ids)
        pieces = []
        for id_, logprob in zip(commit.token_ids, commit.logprobs, strict=True):
            self._unscored.append(ScoredToken(id_, self._text_length, logprob))
            pieces.append(self._detokenizer.push((id_,)))
            self._text_length += len(pieces[-1])
        return "".join(pieces)

    def _released_logprobs(self, *, whole: bool) -> list[ScoredToken]:
        """Of the tokens whose text has been given; of all that are left where the answer ended ``whole``."""
        released = []
        while self._unscored and (whole or self._unscored[0].offset < self._stops.released):
            released.append(self._unscored.popleft())
        return released

    def _parse(self, text: str) -> list[AnswerDelta]:
        if self._parser is not None:
            return self._parser.push(text)
        return [ContentDelta(text)] if text else []

    def _keep(self, delta: AnswerDelta) -> None:
        if isinstance(delta, ContentDelta):
            self._content.append(delta.text)
        elif delta.name is not None:
            self._calls.append((delta.id or "", delta.name, [delta.arguments]))
        else:
            self._calls[delta.index][2].append(delta.arguments)


class Completion:
    """Runs one request for each prompt once: iterate ``steps``, then read the choices, the counts and the tally.

    Choices are numbered over all requests, in their order; ``recordings``, if any, are one a choice.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        tokenizer: Tokenizer,
        metrics: ServingMetrics,
        *,
        tools: bool,
        started: float,
        on_finish: Callable[[Completion], None],
        recordings: Sequence[Recording] = (),
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._started = started
        self._on_finish = on_finish
        self._recordings = recordings
        self._requests = requests
        self._cached = [0] * len(requests)
        self.tokenizer = tokenizer
        self.choices = [
            Choice(tokenizer, request.stopping.strings, tools) for request in requests for _ in range(request.n)
        ]
        self.tally = Tally()
        self.seed: int | None = requests[0].sampling.seed

    @property
    def session_id(self) -> str:
        return self._requests[0].session_id

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self._requests)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    async def steps(self) -> AsyncGenerator[Step]:
        """Generate; closing this generator closes the engine's, which aborts the requests."""
        agent_type = self._agent_type
        n = self._requests[0].n
        try:
            async with aclosing(merged([self._engine.generate(request) for request in self._requests])) as commits:
                async for prompt, commit in commits:
                    now = time.perf_counter()
                    if not self.completion_tokens:
                        self._metrics.observe_first_token(agent_type, now - self._started)
                    self._count(prompt, commit)
                    number = prompt * n + commit.choice
                    if self._recordings:
                        self._recordings[number].add(commit)
                    yield self.choices[number].push(number, commit, now)
                    await asyncio.sleep(0)  # a backlog of commits must not keep the event loop from all others
            if not all(choice.finish_reason for choice in self.choices):
                raise EngineUnavailable("The engine ended before the answer was complete; try again.")
            self._observe_finish()
            self._on_finish(self)
        finally:
            for recording in self._recordings:
                recording.abandon()
            if self.completion_tokens:
                self._metrics.count_tokens(
                    agent_type,
                    prompt=self.prompt_tokens,
                    cached=self.cached_tokens,
                    completion=self.completion_tokens,
                )

    async def run(self) -> None:
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass

    @property
    def _agent_type(self) -> str:
        return self._requests[0].agent_type

    def _count(self, prompt: int, commit: Commit) -> None:
        self._cached[prompt] = max(self._cached[prompt], commit.cached_tokens)
        self.seed = self.seed if commit.seed is None else commit.seed
        step, tally = commit.verify_step, self.tally
        if step is None:
            return
        tally.accept_length = tally.accept_length.add_step(step)
        tally.drafted += len(step.drafted)
        tally.verified += step.block_length
        tally.accepted += step.accepted
        if step.drafter is not None and step.drafter not in tally.drafters:
            tally.drafters.append(step.drafter)
        self._metrics.count_step(step, self._agent_type)

    def _observe_finish(self) -> None:
        agent_type = self._agent_type
        self._metrics.observe_request(agent_type, time.perf_counter() - self._started)
        for choice in self.choices:
            if choice.tokens > 1:
                pace = (choice.last_at - choice.first_at) / (choice.tokens - 1)
                self._metrics.observe_token_pace(agent_type, pace)


async def merged(sources: Sequence[AsyncGenerator[Commit]]) -> AsyncGenerator[tuple[int, Commit]]:
    """What sources yield, as it comes, each with its source's number; closing this closes them all.

    A few run at a time, in their order, so that a request with many prompts neither fills the queue nor overflows it.
    """
    waiting = iter(enumerate(sources))
    pending = {asyncio.create_task(_next(source)): number for number, source in islice(waiting, PROMPTS_AT_ONCE)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = pending.pop(task)
                commit = task.result()
                if commit is not None:
                    yield number, commit
                    pending[asyncio.create_task(_next(sources[number]))] = number
                elif (following := next(waiting, None)) is not None:
                    pending[asyncio.create_task(_next(following[1]))] = following[0]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[Commit]) -> Commit | None:
    return await anext(source, None)

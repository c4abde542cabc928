"""Continuous batching with speculation: one ragged target pass after another over all running requests."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from redraft.engine.chat.grammar import GrammarCompiler, Matcher
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.drafters.base import LEAST_SURVIVAL, Drafter, DraftSequence, Proposal, TargetRows
from redraft.engine.drafters.loading import load_version
from redraft.engine.drafters.lookup import SuffixIndex
from redraft.engine.embedded.attention import Segment, arena_slots
from redraft.engine.embedded.cache import CachedSequence, PrefixCache, pages
from redraft.engine.embedded.model import Target
from redraft.engine.embedded.sampler import TokenChooser, entropy, token_logprob
from redraft.engine.embedded.stopping import StopChecker
from redraft.engine.embedded.versions import DrafterVersions
from redraft.engine.policy.base import BlockLengthPolicy
from redraft.engine.protocol import EngineOverloaded, RequestRefused
from redraft.engine.types import (
    MAX_CHOICES,
    Commit,
    DrafterPointer,
    DrafterVersion,
    FinishReason,
    GenerationRequest,
    SpeculationScope,
    TokenLogprob,
    VerifyStep,
)

logger = logging.getLogger(__name__)

PREFILL_ROWS = 192
"""Prompt rows of one pass; bounds how long a prompt can hold up running answers, and a new request."""

PREFILL_CONTEXT = 1024
"""Tokens of context that cost a prompt row about as much in attention as all its matrix products.

Where answers are running, a pass has fewer rows by that.
"""

BUSY_ROWS = 32
"""Rows for which draft K/V is made again in a pass of running answers; bounds what that adds to the pass."""

MIN_DRAFT_WINDOW = 64
"""Tokens of draft K/V from which a drafter that did not see a prompt's beginning takes over from n-gram."""

ALL = SpeculationScope("all")
NO_PROPOSAL = Proposal()


@dataclass(frozen=True, slots=True)
class Waiting:
    """The next choice of a request to get a place; ``matcher`` stands at the beginning of its grammar.

    The second queues when the prompt has been read, every further one when the one before it got its place: behind all
    others, so that requests take turns.
    """

    request: GenerationRequest
    choice: int
    seed: int
    matcher: Matcher | None


@dataclass(slots=True, eq=False)
class Running:
    """One choice of a request that holds K/V; ``tokens`` are prompt and committed answer.

    It ends with the ``drafter`` that it began with.
    """

    request: GenerationRequest
    choice: int
    seed: int
    matcher: Matcher | None
    kv: CachedSequence
    drafter: Drafter | None
    cached_tokens: int
    tokens: list[int]
    chooser: TokenChooser
    stop: StopChecker
    index: SuffixIndex = field(default_factory=SuffixIndex)

    @property
    def prefilling(self) -> bool:
        return self.kv.length < len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class Rows:
    """A sequence's rows in a pass: a prompt chunk, or its last committed token with drafted tokens behind it.

    ``drafter`` is who was asked for them, None where speculation is off; ``explored`` is the policy's.
    """

    sequence: Running
    tokens: Sequence[int]
    proposal: Proposal = NO_PROPOSAL
    drafter: DrafterVersion | None = None
    explored: bool = False


@dataclass(frozen=True, slots=True)
class Growth:
    """Rows of ``kv`` from ``start`` to ``end``, where its draft K/V begins, that are read again to have theirs.

    One row more is read: a row's draft K/V may depend on the token after it.
    """

    kv: CachedSequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pass:
    """What the verify steps of one pass have in common; times in milliseconds."""

    batch_size: int
    rows: int
    draft_ms: float
    verify_ms: float


class EngineCore:
    """Owns target, cache and sequences; used by one thread."""

    def __init__(
        self,
        target: Target,
        cache_tensor: Tensor,
        *,
        identity: str,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler | None,
        context_length: int,
        drafter: Drafter | None,
        policy: BlockLengthPolicy,
        block_size: int,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self.target = target
        self._kv = cache_tensor
        self.cache = PrefixCache(cache_tensor)
        self._identity = identity
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._eos_ids = frozenset(target.config.eos_ids)
        self._context_length = context_length
        self.versions = DrafterVersions(drafter, self.cache, slots=cache_tensor.shape[1], identity=identity)
        self.policy = policy
        self.block_size = block_size
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._switched_off: set[SpeculationScope] = set()
        self.running: list[Running] = []
        self.waiting: deque[Waiting] = deque()

    @property
    def max_tokens_per_request(self) -> int:
        """Prompt and answer together, bounded by the context and by the cache."""
        return min(self._context_length, self.cache.slots)

    @property
    def request_ids(self) -> set[str]:
        """Requests that hold or wait for a place."""
        requests = [running.request for running in self.running] + [waiting.request for waiting in self.waiting]
        return {request.request_id for request in requests}

    @property
    def kv_bytes_per_slot(self) -> int:
        return self.target.kv_bytes_per_token

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts for new sequences."""
        return self.versions.serving

    @property
    def speculating(self) -> bool:
        return self.drafter is not None and ALL not in self._switched_off

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; raises `RequestRefused` if it can never run and `EngineOverloaded` if the queue is full."""
        self._check(request)
        if request.request_id in self.request_ids:
            raise RequestRefused(f"request id {request.request_id} is already in use", "request_id")
        queued = sum(waiting.choice == 0 for waiting in self.waiting)
        if queued >= self._max_waiting + max(0, self.max_running - len(self.running)):
            raise EngineOverloaded(f"{len(self.running)} answers are running and {queued} requests waiting; try again")
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        self.waiting.append(Waiting(request, 0, seed, self._matcher(request)))

    def abort(self, request_id: str) -> list[Commit]:
        """End a request; the commit says so to whoever still listens. Unknown ids are ignored."""
        if request_id not in self.request_ids:
            return []
        self.waiting = deque(waiting for waiting in self.waiting if waiting.request.request_id != request_id)
        for sequence in [s for s in self.running if s.request.request_id == request_id]:
            self._finish(sequence)
        self._switched_off.discard(SpeculationScope("request", request_id))
        return [Commit(request_id=request_id, choice=0, token_ids=(), finish_reason="abort")]

    def set_speculation(self, scope: SpeculationScope, on: bool) -> None:
        """Raises `RequestRefused` for a request that is not running."""
        if scope.kind == "request" and scope.name not in self.request_ids:
            raise RequestRefused(f"no request {scope.name} is running")
        if on:
            self._switched_off.discard(scope)
        else:
            self._switched_off.add(scope)

    def load_drafter(self, version: DrafterVersion, folder: Path) -> Drafter:
        """A drafter that could be added to ``versions``; raises `DrafterError`. On any thread."""
        return load_version(version, folder, self.target, self._identity, self._kv.shape[1], self._context_length)

    def activate(self, pointer: DrafterPointer) -> None:
        """Serve new sequences as the pointer says; raises `RequestRefused` with what to do instead."""
        self.versions.activate(pointer)
        self._retire_drafters()

    def rematerialise(self) -> bool:
        """Grow the draft K/V of the latest idle prefix that lacks some backwards by a chunk; False if none lacks any.

        For when there is nothing to run.
        """
        growth = self._growth(self.cache.idle(), PREFILL_ROWS)
        if growth is None:
            return False
        self._forward([], growth)
        return True

    def _growth(self, sequences: Iterable[CachedSequence], rows: int) -> Growth | None:
        """At most ``rows`` of the first sequence that lacks some, once it has what others have of the same tokens."""
        drafter = self.drafter
        if drafter is None or drafter.kv is None:
            return None
        for kv in sequences:
            self._claim_draft_kv(kv, drafter)
            border = self.cache.share_draft_kv(kv)
            if kv.draft_start > 0:
                return Growth(kv, max(border, kv.draft_start - rows), kv.draft_start)
        return None

    def step(self) -> list[Commit]:
        """Admit what fits, run one pass, and return what it committed."""
        self._admit()
        started = perf_counter()
        prompts = [*self._prompt_rows()]
        batch = [*self._decoding_rows(), *prompts]
        if not batch:
            return []
        growth = None
        if not prompts:
            mine = [sequence.kv for sequence in self.running if sequence.drafter is self.drafter]
            growth = self._growth(sorted(mine, key=lambda kv: kv.draft_start), BUSY_ROWS)
        drafted = perf_counter()
        hidden, materialise_seconds = self._forward(batch, growth)
        logits = self._logits(batch, hidden)
        arg_max = logits.argmax(-1).tolist()
        verified = perf_counter()
        shared = Pass(
            batch_size=len(batch),
            rows=hidden.shape[0],
            draft_ms=(drafted - started + materialise_seconds) * 1e3,
            verify_ms=(verified - drafted - materialise_seconds) * 1e3,
        )
        commits: list[Commit] = []
        committed_rows: list[int] = []
        first = 0
        for rows in batch:
            end = first + self._logit_rows(rows)
            if rows.sequence in self.running:
                try:
                    for commit in self._advance(rows, logits[first:end], arg_max[first:end], shared):
                        commits.append(commit)
                        if commit.verify_step is not None:
                            committed_rows.extend(range(first, first + len(commit.token_ids)))
                except Exception:
                    request_id = rows.sequence.request.request_id
                    logger.exception("request %s is aborted", request_id)
                    commits.extend(self.abort(request_id))
            first = end
        return _with_entropy(commits, logits, committed_rows)

    def _check(self, request: GenerationRequest) -> None:
        prompt, answer = len(request.prompt_ids), request.stopping.max_tokens
        if not prompt:
            raise RequestRefused("the prompt is empty", "prompt")
        if answer < 1:
            raise RequestRefused(f"max_tokens is {answer}; it must be at least 1", "max_tokens")
        vocab = self.target.config.vocab
        if not all(0 <= token < vocab for token in request.prompt_ids):
            raise RequestRefused(f"the prompt has token ids outside 0 to {vocab - 1}", "prompt")
        if prompt + answer > self._context_length:
            raise RequestRefused(
                f"{prompt} prompt tokens and {answer} answer tokens do not fit the context of "
                f"{self._context_length} tokens",
                "max_tokens",
            )
        if pages(prompt + answer) > self.cache.slots:
            raise RequestRefused(
                f"{prompt} prompt tokens and {answer} answer tokens do not fit the K/V budget of "
                f"{self.cache.slots} tokens; lower max_tokens, or raise engine.kv_bytes",
                "max_tokens",
            )
        if not 1 <= request.n <= MAX_CHOICES:
            raise RequestRefused(f"n is {request.n}; it must be 1 to {MAX_CHOICES}", "n")
        if request.logprobs is not None and not 0 <= request.logprobs <= vocab:
            raise RequestRefused(f"logprobs is {request.logprobs}; it must be 0 to {vocab}", "logprobs")
        if not all(0 <= token < vocab for token, _ in request.sampling.logit_bias):
            raise RequestRefused(f"logit_bias has token ids outside 0 to {vocab - 1}", "logit_bias")
        if request.constraint is not None and request.stopping.ignore_eos:
            raise RequestRefused("ignore_eos would run past the end of a constrained answer", "ignore_eos")

    def _matcher(self, request: GenerationRequest) -> Matcher | None:
        if request.constraint is None:
            return None
        if self._grammars is None:
            raise RequestRefused("constrained answers are not possible with this model's tokenizer")
        try:
            return self._grammars.matcher(request.constraint)
        except ValueError as error:
            raise RequestRefused(f"the grammar of the answer is wrong: {error}") from error

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            waiting = self.waiting[0]
            request = waiting.request
            capacity = len(request.prompt_ids) + request.stopping.max_tokens
            kv = self.cache.acquire(request.principal.tenant, request.prompt_ids, capacity)
            if kv is None:
                return
            if self.drafter is not None:
                self._claim_draft_kv(kv, self.drafter)
            self.waiting.popleft()
            if 0 < waiting.choice < request.n - 1:
                self.waiting.append(replace(waiting, choice=waiting.choice + 1))
            chooser = TokenChooser(
                request.sampling,
                request.prompt_ids,
                seed=waiting.seed,
                choice=waiting.choice,
                matcher=waiting.matcher.deep_copy() if waiting.matcher else None,
            )
            self.running.append(
                Running(
                    request=request,
                    choice=waiting.choice,
                    seed=waiting.seed,
                    matcher=waiting.matcher,
                    kv=kv,
                    drafter=self.drafter,
                    cached_tokens=kv.length,
                    tokens=list(request.prompt_ids),
                    chooser=chooser,
                    stop=StopChecker(request.stopping, self._eos_ids, self._tokenizer),
                )
            )

    def _claim_draft_kv(self, kv: CachedSequence, drafter: Drafter) -> None:
        """Draft K/V of another version is of no use: the window grows from here."""
        if kv.drafter != drafter.version:
            kv.drafter = drafter.version
            kv.draft_start = kv.length

    def _decoding_rows(self) -> list[Rows]:
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        asked = [self._drafter_of(sequence) for sequence in decoding]
        proposals = [NO_PROPOSAL] * len(decoding)
        for each in {drafter for drafter in asked if drafter is not None}:
            chosen = [index for index, other in enumerate(asked) if other is each]
            drafted = each.propose([self._draft_sequence(decoding[index]) for index in chosen])
            for index, proposal in zip(chosen, drafted, strict=True):
                proposals[index] = proposal
        lengths = self.policy.block_lengths(proposals)
        batch = []
        for sequence, drafter, proposal, (length, explored) in zip(decoding, asked, proposals, lengths, strict=True):
            tokens = proposal.tokens[:length]
            tokens = tokens[: sequence.chooser.allowed(tokens)]
            version = drafter.version if drafter else None
            batch.append(Rows(sequence, (sequence.tokens[-1], *tokens), proposal, version, explored))
        return batch

    def _drafter_of(self, sequence: Running) -> Drafter | None:
        if sequence.drafter is None or not self._speculates(sequence.request):
            return None
        window = sequence.kv.length - sequence.kv.draft_start
        late = sequence.kv.draft_start > 0 and window < MIN_DRAFT_WINDOW
        return self.versions.floor if late else sequence.drafter

    def _draft_sequence(self, sequence: Running) -> DraftSequence:
        return DraftSequence(
            tokens=sequence.tokens,
            length=min(self.block_size, sequence.stop.remaining) - 1,
            least_survival=LEAST_SURVIVAL,
            slot=sequence.kv.start,
            room=sequence.kv.capacity - sequence.kv.length,
            window_start=sequence.kv.draft_start,
            index=sequence.index,
            sampling=sequence.request.sampling,
            seed=sequence.seed,
            choice=sequence.choice,
        )

    def _speculates(self, request: GenerationRequest) -> bool:
        scopes = (
            ALL,
            SpeculationScope("tenant", request.principal.tenant),
            SpeculationScope("request", request.request_id),
        )
        return request.speculation and self._switched_off.isdisjoint(scopes)

    def _prompt_rows(self) -> Iterable[Rows]:
        budget = float(PREFILL_ROWS)
        holds_up = any(not sequence.prefilling for sequence in self.running)
        for sequence in self.running:
            done = sequence.kv.length
            cost = 1 + done / PREFILL_CONTEXT if holds_up else 1.0
            if sequence.prefilling and budget >= cost:
                chunk = sequence.tokens[done : done + int(budget / cost)]
                budget -= len(chunk) * cost
                yield Rows(sequence, chunk)

    def _forward(self, batch: Sequence[Rows], growth: Growth | None = None) -> tuple[Tensor, float]:
        """Hidden states [rows, hidden] of a pass, those of ``growth`` last, and the seconds that its draft K/V took.

        Draft K/V is written whether or not anybody speculates at present; a rejected row's is overwritten later. The
        target's K/V of rows that are read again stays as it is, bit by bit.
        """
        reads = [(rows.sequence.kv, rows.sequence.kv.length, rows.tokens, rows.sequence.drafter) for rows in batch]
        again = None
        if growth is not None:
            kv = growth.kv
            more = kv.tokens[growth.start : growth.end + 1]
            reads.append((kv, growth.start, more, self.drafter))
            kv.draft_start = growth.start
            slot = kv.start + growth.start
            again = None if self.target.invariant else slice(slot, slot + len(more))
        segments: list[Segment] = []
        positions: list[int] = []
        read_tokens: list[int] = []
        for kv, start, read, _ in reads:
            segments.append(Segment(len(read_tokens), len(read), kv.start, start))
            positions.extend(range(start, start + len(read)))
            read_tokens.extend(read)
        drafters = [drafter for *_, drafter in reads]
        device = self.target.device
        tokens, at = torch.tensor(read_tokens, device=device), torch.tensor(positions, device=device)
        reading = dict.fromkeys(drafter for drafter in drafters if drafter and drafter.feature_layers)
        layers = sorted({layer for drafter in reading for layer in drafter.feature_layers})
        kept = self._kv[:, again].clone() if again is not None else None
        hidden, features = self.target.forward(tokens, at, segments, self._kv, layers)
        if kept is not None:
            self._kv[:, again] = kept
        started = perf_counter()
        slots = arena_slots(at, segments) if reading else at
        for drafter in reading:
            own = [index for index, other in enumerate(drafters) if other is drafter]
            theirs = [segments[index] for index in own]
            chosen = _rows(theirs, device) if len(own) < len(segments) else slice(None)
            drafter.materialise(
                TargetRows(
                    features=_columns(features[chosen], layers, drafter.feature_layers),
                    tokens=tokens[chosen],
                    positions=at[chosen],
                    slots=slots[chosen],
                    segments=_side_by_side(theirs),
                    windows=[reads[index][0].draft_start for index in own],
                )
            )
        return hidden, perf_counter() - started

    def _logits(self, batch: Sequence[Rows], hidden: Tensor) -> Tensor:
        wanted: list[int] = []
        end = 0
        for rows in batch:
            end += len(rows.tokens)
            wanted.extend(range(end - self._logit_rows(rows), end))
        if not wanted:
            return hidden.new_empty(0, self.target.config.vocab)
        if len(wanted) < hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        return self.target.logits(hidden)

    def _logit_rows(self, rows: Rows) -> int:
        sequence = rows.sequence
        if not sequence.prefilling:
            return len(rows.tokens)
        return int(sequence.kv.length + len(rows.tokens) == len(sequence.tokens))

    def _advance(self, rows: Rows, logits: Tensor, arg_max: Sequence[int], shared: Pass) -> Iterable[Commit]:
        """Take one sequence's results in, and yield what they commit."""
        sequence, request = rows.sequence, rows.sequence.request
        if not sequence.prefilling:
            yield self._verify(rows, logits, arg_max, shared)
            return
        self.cache.extend(sequence.kv, rows.tokens)
        if not arg_max:
            return
        token = sequence.chooser.choose(logits[0], arg_max[0], len(sequence.tokens))
        finish = sequence.stop.push(token)
        sequence.tokens.append(token)
        if sequence.choice == 0 and request.n > 1:
            self.waiting.append(Waiting(request, 1, sequence.seed, sequence.matcher))
        yield self._commit(sequence, (token,), logits, finish, None)

    def _verify(self, rows: Rows, logits: Tensor, arg_max: Sequence[int], shared: Pass) -> Commit:
        """Commit the drafted tokens the target agrees with and its own next token, up to a stop."""
        sequence, drafted = rows.sequence, rows.tokens[1:]
        position = len(sequence.tokens) - 1
        committed: list[int] = []
        accepted = 0
        finish: FinishReason | None = None
        while finish is None:
            index = len(committed)
            token = sequence.chooser.choose(logits[index], arg_max[index], position + 1 + index)
            committed.append(token)
            finish = sequence.stop.push(token)
            if index == len(drafted) or drafted[index] != token:
                break
            accepted += 1
        sequence.tokens.extend(committed)
        self.cache.extend(sequence.kv, sequence.tokens[position : position + len(committed)])
        step = VerifyStep(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            position=position,
            drafted=rows.proposal.tokens,
            draft_prob=rows.proposal.draft_prob,
            match_length=rows.proposal.match_length,
            block_length=len(drafted),
            accepted=accepted,
            committed=tuple(committed),
            explored=rows.explored,
            batch_size=shared.batch_size,
            total_rows=shared.rows,
            draft_ms=shared.draft_ms,
            verify_ms=shared.verify_ms,
            target_entropy=None,
            drafter=rows.drafter,
            target=self._identity,
            cached_tokens=sequence.cached_tokens,
        )
        return self._commit(sequence, tuple(committed), logits, finish, step)

    def _commit(
        self,
        sequence: Running,
        tokens: tuple[int, ...],
        logits: Tensor,
        finish: FinishReason | None,
        step: VerifyStep | None,
    ) -> Commit:
        commit = Commit(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            token_ids=tokens,
            verify_step=step,
            finish_reason=finish,
            text_end=sequence.stop.text_end,
            logprobs=_logprobs(sequence.request, tokens, logits),
            cached_tokens=sequence.cached_tokens,
            seed=sequence.seed,
        )
        if finish is not None:
            self._finish(sequence)
        return commit

    def _finish(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.kv)
        self._retire_drafters()
        if sequence.request.request_id not in self.request_ids:
            self._switched_off.discard(SpeculationScope("request", sequence.request.request_id))

    def _retire_drafters(self) -> None:
        self.versions.retire({sequence.drafter.version for sequence in self.running if sequence.drafter})


def _rows(segments: Sequence[Segment], device: torch.device) -> Tensor:
    rows = [row for segment in segments for row in range(segment.row, segment.row + segment.rows)]
    return torch.tensor(rows, device=device)


def _side_by_side(segments: Sequence[Segment]) -> list[Segment]:
    """The same segments as if there were no other rows."""
    firsts = accumulate((segment.rows for segment in segments[:-1]), initial=0)
    return [replace(segment, row=row) for segment, row in zip(segments, firsts, strict=True)]


def _columns(features: Tensor, layers: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Features [rows, len(wanted) * hidden] of the ``wanted`` ones of ``layers``."""
    if len(wanted) == len(layers):
        return features
    parts = features.chunk(len(layers), dim=-1)
    return torch.cat([parts[layers.index(layer)] for layer in wanted], dim=-1)


def _with_entropy(commits: list[Commit], logits: Tensor, rows: Sequence[int]) -> list[Commit]:
    """The commits whose verify steps know the target's entropy; ``rows`` are those of their tokens, in order."""
    if not rows:
        return commits
    values = iter(entropy(logits[torch.tensor(rows, device=logits.device)]).tolist())
    told = []
    for commit in commits:
        if commit.verify_step is not None:
            entropies = tuple(next(values) for _ in commit.token_ids)
            step = msgspec.structs.replace(commit.verify_step, target_entropy=entropies)
            commit = msgspec.structs.replace(commit, verify_step=step)
        told.append(commit)
    return told


def _logprobs(request: GenerationRequest, tokens: tuple[int, ...], logits: Tensor) -> tuple[TokenLogprob, ...] | None:
    if request.logprobs is None:
        return None
    return tuple(token_logprob(row, token, request.logprobs) for row, token in zip(logits, tokens, strict=False))

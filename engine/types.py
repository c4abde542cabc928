"""The records that cross folders and processes: requests, commits, verify steps, references, pointers.

Everything here is immutable, serialisable with msgspec and free of tensors. The words are DESIGN's: a *verify step*
is one request's part in one decode-phase target pass; *block length* is the number of drafted tokens sent to
verification; *accept length* is committed tokens over verify steps, pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort"]
LosslessMode = Literal["invariant", "tolerant"]
SamplingMode = Literal["greedy", "sampled"]

FIRST_CONTEXT_BUCKET = 512
LOOPING_TOKENS = 60
LOOPING_DISTINCT = 0.6

MAX_CHOICES = 128
"""Most answers to one request."""

MIN_TEMPERATURE = 1e-4
"""Below this, sampling is arg-max to within the precision of logits, and is taken as greedy."""


class Principal(Struct, frozen=True):
    """Whose request it is; caches, sessions and spans never cross from one tenant to another."""

    tenant: str = "default"


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen from the target's logits; ``temperature`` 0 is greedy.

    ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, presence and frequency penalty 0 and repetition penalty 1 leave the
    distribution as it is. ``logit_bias`` pairs token ids with what is added to their logits. ``seed`` None lets the
    engine draw one; equal seeds give equal answers with any drafter, block length and batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    @property
    def mode(self) -> SamplingMode:
        return "greedy" if self.temperature < MIN_TEMPERATURE else "sampled"


GREEDY = SamplingParams(temperature=0.0)


class StopConditions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When an answer ends: after ``max_tokens``, at an end token, a stop token id, or a stop string."""

    max_tokens: int
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Constraint(Struct, frozen=True):
    """What an answer may consist of: one JSON value of a JSON schema, or a string of a Lark grammar (llguidance's)."""

    kind: Literal["json_schema", "lark"]
    text: str


class GenerationRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, in token ids, and everything that decides its answers; ``n`` asks for that many choices.

    ``logprobs`` asks for each committed token's log-probability and that many of the most likely alternatives.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    stopping: StopConditions
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    logprobs: int | None = None
    constraint: Constraint | None = None
    speculation: bool = True
    principal: Principal = Principal()
    agent_type: str = "default"
    session_id: str = ""


class DrafterVersion(Struct, frozen=True):
    """An immutable drafter: its kind (``ngram``, ``dflash``, ``eagle3``) and its registry id."""

    kind: str
    id: str


FLOOR = DrafterVersion("ngram", "builtin")
"""n-gram: always there, and without a checkpoint."""


class VerifyStep(Struct, frozen=True, kw_only=True):
    """One request's part in one decode-phase target pass.

    ``position`` is the absolute position of the block start. ``drafted`` are the proposed tokens, which may be more
    than the ``block_length`` that were verified; ``draft_prob`` runs beside them, or is None where the drafter has no
    probabilities and ``match_length`` (tokens of context that matched) stands instead. ``accepted`` counts drafted
    tokens the target agreed with; ``committed`` are the tokens that became output, after any stop. ``batch_size``
    counts requests in the pass and ``total_rows`` its token rows. ``explored`` says that the length was
    fixed, not chosen by what was drafted. Entropies of the target are in nats, one a committed token.
    ``cached_tokens`` is how much of the prompt came from the prefix cache.
    """

    request_id: str
    choice: int
    position: int
    drafted: tuple[int, ...]
    draft_prob: tuple[float, ...] | None
    match_length: int | None
    block_length: int
    accepted: int
    committed: tuple[int, ...]
    explored: bool
    batch_size: int
    total_rows: int
    draft_ms: float
    verify_ms: float
    target_entropy: tuple[float, ...] | None
    drafter: DrafterVersion | None
    target: str
    cached_tokens: int


class TokenLogprob(Struct, frozen=True):
    """Log-probability of a committed token in the target's own distribution, and the most likely (id, log p) there.

    The distribution is the softmax of the target's logits, before bias, penalties, temperature, filters and grammar.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Commit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token ids that became output, and the verify step that committed them (None for the token prefill samples).

    The last commit of a choice carries ``finish_reason``. ``text_end`` is set when a stop string ended the answer:
    the length in characters of the answer's text before the stop string. ``logprobs`` stand beside ``token_ids`` where
    the request asked for them.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    verify_step: VerifyStep | None = None
    finish_reason: FinishReason | None = None
    text_end: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    seed: int | None = None


class AcceptLength(Struct, frozen=True):
    """Accept length ``tau``, always with its numerator and denominator; adding two pools them."""

    committed: int = 0
    verify_steps: int = 0

    @property
    def tau(self) -> float | None:
        return self.committed / self.verify_steps if self.verify_steps else None

    def __add__(self, other: AcceptLength) -> AcceptLength:
        return AcceptLength(self.committed + other.committed, self.verify_steps + other.verify_steps)

    def add_step(self, step: VerifyStep) -> AcceptLength:
        return AcceptLength(self.committed + len(step.committed), self.verify_steps + 1)


class FeatureRef(Struct, frozen=True, kw_only=True):
    """Where the target's hidden states of some rows are kept; ``row_end`` is exclusive."""

    sample_id: str
    store: str
    generation: int
    row_start: int
    row_end: int
    layer_ids: tuple[int, ...]
    target: str


class Canary(Struct, frozen=True):
    """A version on trial for a share of sessions, 0 < share ≤ 1."""

    version: DrafterVersion
    share: float


class DrafterPointer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which drafter serves one target; ``token`` grows with every change and fences late writers."""

    target: str
    serving: DrafterVersion
    previous: DrafterVersion | None = None
    canary: Canary | None = None
    pins: dict[str, DrafterVersion] = {}
    token: int = 0


class SpeculationScope(Struct, frozen=True):
    """What a kill switch covers: everything, one tenant, or one running request (``name`` says which)."""

    kind: Literal["all", "tenant", "request"]
    name: str = ""


class Capabilities(Struct, frozen=True, kw_only=True, tag=True):
    """What an engine can do, found out once at connect.

    ``target`` is the identity hash of the served checkpoint. A prompt may have ``max_prompt_tokens``, and prompt and
    answer together one more. ``parameters`` names the sampling and stop parameters
    that are honoured; a gateway refuses any other by name.
    """

    target: str
    model_name: str
    context_length: int
    vocab_size: int
    max_prompt_tokens: int
    lossless: LosslessMode
    parameters: frozenset[str]
    constrained_decoding: bool
    logprobs: bool
    hot_swap: bool
    telemetry: bool
    draft_prob: bool


class Health(Struct, frozen=True, kw_only=True, tag=True):
    """An engine's present state; ``detail`` says in words what is wrong, ready or not.

    ``token`` is that of the pointer it was told last, 0 if it was told none.
    """

    ready: bool
    detail: str = ""
    running: int = 0
    waiting: int = 0
    kv_used_bytes: int = 0
    kv_budget_bytes: int = 0
    drafter: DrafterVersion | None = None
    token: int = 0
    speculation: bool = True


class Stratum(Struct, frozen=True):
    """The cell in which drift is watched."""

    tenant: str
    agent_type: str
    context_bucket: int
    mode: SamplingMode
    constrained: bool


def context_bucket(position: int) -> int:
    """Upper end, in tokens, of the context bucket of a last committed position: 512, 1024, 2048, …

    >>> [context_bucket(p) for p in (0, 512, 513, 3000)]
    [512, 512, 1024, 4096]
    """
    bucket = FIRST_CONTEXT_BUCKET
    while bucket < position:
        bucket *= 2
    return bucket


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning of two runs of token ids.

    >>> shared_length([1, 2, 3], [1, 2, 4, 5]), shared_length([1, 2], [1, 2, 3]), shared_length([], [1])
    (2, 2, 0)
    """
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether an answer repeats itself: 60 tokens or more with fewer than 60 % distinct 8-grams.

    >>> is_looping(list(range(100))), is_looping([1, 2, 3] * 40), is_looping([1] * 59)
    (False, True, False)
    """
    if len(tokens) < LOOPING_TOKENS:
        return False
    grams = [tuple(tokens[start : start + 8]) for start in range(len(tokens) - 7)]
    return len(set(grams)) < LOOPING_DISTINCT * len(grams)

"""The parameters that every way of asking for text has in common: as clients send them, and as they are meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from redraft.engine.types import MAX_CHOICES, Capabilities, SamplingParams
from redraft.gateway.errors import ApiError, InvalidRequest

TokenId = Annotated[int, Meta(ge=0)]
TokenCount = Annotated[int, Meta(ge=1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class RedraftOptions(Struct, forbid_unknown_fields=True):
    """This server's own: ``speculation`` false verifies no drafts; ``return_statistics`` tells what they brought."""

    speculation: bool | None = None
    return_statistics: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What chat and text completions share on the wire; null is as good as absent."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, _Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    redraft: RedraftOptions | None = None


class Generation(Struct, frozen=True, kw_only=True):
    """What a client asks for, whatever protocol it came in; ``max_tokens`` None means as many as fit.

    ``logprobs`` is the number of alternatives to tell beside each token, None for no log-probabilities.
    """

    sampling: SamplingParams
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None
    speculation: bool
    stream: bool
    include_usage: bool
    return_statistics: bool


def generation(
    wire: GenerationFields,
    capabilities: Capabilities,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> Generation:
    """Check what can be known without the prompt's tokens; raises ApiError."""
    check_model(wire.model, capabilities)
    check_token_ids(wire.stop_token_ids or (), capabilities, "stop_token_ids")
    check_token_ids(wire.logit_bias or (), capabilities, "logit_bias")
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")
    redraft = wire.redraft or RedraftOptions()
    return Generation(
        sampling=_sampling(wire, capabilities),
        max_tokens=max_tokens,
        stop_strings=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        n=wire.n or 1,
        logprobs=logprobs,
        speculation=redraft.speculation is not False,
        stream=bool(wire.stream),
        include_usage=wire.stream_options is not None and bool(wire.stream_options.include_usage),
        return_statistics=bool(redraft.return_statistics),
    )


def check_model(model: str, capabilities: Capabilities) -> None:
    if model != capabilities.model_name:
        message = f"The model {model[:256]!r} does not exist here; this server serves {capabilities.model_name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")


def check_token_ids(ids: Iterable[int], capabilities: Capabilities, param: str) -> None:
    if any(id_ >= capabilities.vocab_size for id_ in ids):
        raise InvalidRequest(f"Token ids here are below {capabilities.vocab_size}.", param)


def _sampling(wire: GenerationFields, capabilities: Capabilities) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if wire.temperature is None else wire.temperature,
        top_p=1.0 if wire.top_p is None else wire.top_p,
        top_k=min(max(wire.top_k or 0, 0), capabilities.vocab_size),
        min_p=wire.min_p or 0.0,
        presence_penalty=wire.presence_penalty or 0.0,
        frequency_penalty=wire.frequency_penalty or 0.0,
        repetition_penalty=1.0 if wire.repetition_penalty is None else wire.repetition_penalty,
        logit_bias=tuple((wire.logit_bias or {}).items()),
        seed=wire.seed,
    )

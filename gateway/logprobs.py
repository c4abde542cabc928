"""Log-probabilities of an answer's tokens, as chat and as text completions tell them."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.gateway.chat_response import AlternativeOut, LogprobsOut, TokenLogprobOut
from redraft.gateway.completion import ScoredToken
from redraft.gateway.text_response import TextLogprobsOut

LEAST = -9999.0
"""What stands for a probability of zero, as JSON has no infinity."""


def token_string(tokenizer: Tokenizer, id_: int) -> str:
    """A token's text, or its name; one that ends inside a character is spelled as OpenAI does, ``bytes:\\xe2\\x80``."""
    raw = tokenizer.token_bytes(id_)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> LogprobsOut:
    def alternative(id_: int, logprob: float) -> AlternativeOut:
        raw = None if id_ in tokenizer.special_ids else list(tokenizer.token_bytes(id_))
        return AlternativeOut(token_string(tokenizer, id_), max(logprob, LEAST), raw)

    content = []
    for token in scored:
        chosen = alternative(token.id, token.logprob.logprob)
        top = [alternative(id_, logprob) for id_, logprob in token.logprob.top]
        content.append(TokenLogprobOut(chosen.token, chosen.logprob, chosen.bytes, top))
    return LogprobsOut(content)


def text_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> TextLogprobsOut:
    tops = (dict([*token.logprob.top, (token.id, token.logprob.logprob)]) for token in scored)
    return TextLogprobsOut(
        [token_string(tokenizer, token.id) for token in scored],
        [max(token.logprob.logprob, LEAST) for token in scored],
        [{token_string(tokenizer, id_): max(logprob, LEAST) for id_, logprob in top.items()} for top in tops],
        [token.offset for token in scored],
    )

"""Which tokens of an answer are tool calls in the Hermes convention."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from redraft.engine.chat.tokenizer import Tokenizer

_OPEN, _CLOSE = b"<tool_call>", b"</tool_call>"


def tool_call_spans(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Runs [start, end) of tokens that hold a tool call or a part of one, marks included; a last one may be open."""
    pieces = [tokenizer.token_bytes(id_) for id_ in token_ids]
    ends = list(accumulate(map(len, pieces)))
    text = b"".join(pieces)
    spans = []
    start = text.find(_OPEN)
    while start >= 0:
        close = text.find(_CLOSE, start)
        end = close + len(_CLOSE) if close >= 0 else len(text)
        spans.append((bisect_right(ends, start), bisect_left(ends, end) + 1))
        start = text.find(_OPEN, end)
    return spans

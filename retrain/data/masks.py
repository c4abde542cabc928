"""Which tokens of a conversation are supervised: what the assistant wrote, and the end token after it."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.messages import Message, Tool

Span = tuple[int, int]


def encode_with_spans(
    encoder: ChatEncoder, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """Token ids of a whole conversation, and the [start, end) spans of its assistant turns.

    A span holds content, tool calls and the end token, but neither the turn's header nor the line break after it.
    What stands before a span is exactly the prompt that serving renders for that turn; a turn whose first characters
    the tokenizer fuses with the header has no such prompt, and no span.
    """
    ids = encoder.encode_chat(messages, tools, add_generation_prompt=False)
    spans = []
    for i, message in enumerate(messages):
        if message.role != "assistant" or i == 0:
            continue
        prompt = encoder.encode_chat(messages[:i], tools)
        until = len(encoder.encode_chat(messages[: i + 1], tools, add_generation_prompt=False))
        if ids[: len(prompt)] == prompt:
            spans.append((len(prompt), _after_end_token(encoder, ids, len(prompt), until)))
    return ids, tuple(spans)


def _after_end_token(encoder: ChatEncoder, ids: Sequence[int], start: int, until: int) -> int:
    return next(at for at in range(until, start, -1) if ids[at - 1] in encoder.tokenizer.eos_ids)

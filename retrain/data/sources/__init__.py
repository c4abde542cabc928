"""Where training conversations come from: one module a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.families import joined
from redraft.retrain.data.sources import bfcl_multi_turn, bfcl_single, code, math, plain, tau2


def _families(conversations: Callable[[], Iterator[Conversation]], *, near: bool) -> Iterator[Conversation]:
    return joined(conversations(), near=near)


SOURCES: dict[Source, Callable[[], Iterator[Conversation]]] = {
    "bfcl-single": partial(_families, bfcl_single.conversations, near=True),
    "bfcl-multi-turn": partial(_families, bfcl_multi_turn.conversations, near=True),
    "airline": partial(_families, partial(tau2.conversations, "airline"), near=True),
    "retail": partial(_families, partial(tau2.conversations, "retail"), near=True),
    "code": partial(_families, code.conversations, near=True),
    "math": partial(_families, math.conversations, near=False),
    "plain": partial(_families, plain.conversations, near=False),
}

"""A training sample: token ids, and which of them are learnt from."""

from __future__ import annotations

from msgspec import Struct

from redraft.retrain.data.splits import Split


class Sample(Struct, frozen=True):
    """A prompt and the target's answer; ``spans`` are the supervised [start, end) runs of ``token_ids``.

    Training draws a sample in proportion to its ``weight``.
    """

    id: str
    source: str
    family: str
    split: Split
    session: str
    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    greedy: bool
    looping: bool
    weight: float = 1.0

"""The target's features, captured one way for training, replay and the gate.

Sequences are read whole, several in one pass, on scratch K/V that all layers share, since nobody reads it afterwards.
Beside serving they are read one by one in short passes instead, going on where the one before was the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.engine.embedded.attention import Segment
from redraft.engine.embedded.cache import new_kv, pages
from redraft.engine.embedded.model import Target
from redraft.engine.types import FeatureRef, shared_length
from redraft.retrain.data.sample import Sample
from redraft.retrain.features_store import FeatureStore
from redraft.retrain.frozen import FrozenTarget

PASS_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 13}
"""Tokens of one pass; a longer sequence has a pass of its own."""

RUN = 128
"""Rows that are kept together."""

CAPTURE_ROWS = {"cuda": 1 << 13, "cpu": 256}
"""Tokens of a pass that reads features: half a second on one core."""


class Captured(NamedTuple):
    """What the target made of one sequence: row i is token i.

    features [tokens, layers * hidden] are what left the feature layers, side by side; hidden [tokens, hidden] is what
    left the last layer, before the final norm.
    """

    features: Tensor
    hidden: Tensor


Capture = Callable[[Sequence[Sequence[int]]], list[Captured]]


class FeatureCapture:
    """Captures the features of the target's layers ``feature_layers``: 0-based, ascending, what leaves a layer."""

    def __init__(self, target: Target, feature_layers: Sequence[int]) -> None:
        self.target = target
        self.feature_layers = check_layers(target, feature_layers)
        self._kv = self._scratch(0)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        return [captured for group in _passes(sequences, self.target.device) for captured in self._capture(group)]

    def _capture(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        target = self.target
        lengths = [len(sequence) for sequence in sequences]
        segments: list[Segment] = []
        row = slot = 0
        for length in lengths:
            segments.append(Segment(row, length, slot, 0))
            row += length
            slot += pages(length)
        if self._kv.shape[1] < slot:
            self._kv = self._scratch(slot)
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden, features = target.forward(
            tokens.to(target.device), positions.to(target.device), segments, self._kv, self.feature_layers
        )
        assert len(features) == len(hidden) == sum(lengths), "a pass must have one row a token"
        return [
            Captured(*parts)
            for parts in zip(features.split_with_sizes(lengths), hidden.split_with_sizes(lengths), strict=True)
        ]

    def _scratch(self, slots: int) -> Tensor:
        """K/V [layers, slots, 2 * kv_heads, head_dim] whose layers are one."""
        config = self.target.config
        kv = new_kv(1, slots, 2 * config.kv_heads, config.head_dim, self.target.dtype, self.target.device)
        return kv.expand(config.layers, -1, -1, -1)


def _passes(sequences: Sequence[Sequence[int]], device: torch.device) -> Iterator[list[Sequence[int]]]:
    group: list[Sequence[int]] = []
    total = 0
    for sequence in sequences:
        if group and total + len(sequence) > PASS_TOKENS[device.type]:
            yield group
            group, total = [], 0
        group.append(sequence)
        total += len(sequence)
    if group:
        yield group


class PatientCapture:
    """Captures the same in passes of ``rows`` tokens, with ``between`` called before each: it may wait there, or raise.

    A sequence that begins like the one before is read from where they part, so turns of a session are best asked for in
    a row. Memory is the K/V and the features of the longest sequence.
    """

    def __init__(
        self, target: Target, feature_layers: Sequence[int], rows: int, between: Callable[[], None] = lambda: None
    ) -> None:
        self.target = target
        self.feature_layers = check_layers(target, feature_layers)
        self._rows = rows
        self._between = between
        self._tokens: Sequence[int] = ()
        self._captured = Captured(torch.empty(0), torch.empty(0))
        self._kv = self._new_kv(0)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        return [self._capture(sequence) for sequence in sequences]

    def _capture(self, sequence: Sequence[int]) -> Captured:
        if pages(len(sequence)) > self._kv.shape[1]:
            kv = self._new_kv(pages(len(sequence)))
            kv[:, : self._kv.shape[1]] = self._kv
            self._kv = kv
        first = shared_length(self._tokens, sequence)
        parts = [Captured(*(rows[:first] for rows in self._captured))] if first else []
        self._tokens = ()
        while first < len(sequence):
            self._between()
            end = min(first + self._rows, len(sequence))
            tokens = torch.tensor(sequence[first:end], device=self.target.device)
            positions = torch.arange(first, end, device=self.target.device)
            segments = [Segment(0, end - first, 0, first)]
            hidden, features = self.target.forward(tokens, positions, segments, self._kv, self.feature_layers)
            parts.append(Captured(features, hidden))
            first = end
        self._captured = Captured(*map(torch.cat, zip(*parts, strict=True)))
        self._tokens = sequence
        return self._captured

    def _new_kv(self, slots: int) -> Tensor:
        config = self.target.config
        return new_kv(config.layers, slots, 2 * config.kv_heads, config.head_dim, self.target.dtype, self.target.device)


def check_layers(target: Target, layers: Sequence[int]) -> tuple[int, ...]:
    if list(layers) != sorted(set(layers)) or not all(0 <= layer < target.config.layers for layer in layers):
        raise ValueError(f"feature layers {list(layers)} must ascend within 0 to {target.config.layers - 1}")
    return tuple(layers)


class FeatureCache:
    """Captured features of samples, kept in a store as long as it keeps them and captured again when it does not.

    Rows are kept in runs of `RUN` named by all tokens up to their end, so what prompts share is kept once and nothing
    stale is ever found. Where ``hidden`` is wanted, last hidden states are kept from the first supervised position on,
    and rows before it come back as zeros; without it they come back empty. All come back on the target's device,
    wherever the store keeps them.
    """

    def __init__(
        self,
        capture: Capture,
        store: FeatureStore,
        target: FrozenTarget,
        *,
        layers: Sequence[int],
        hidden: bool,
    ) -> None:
        self._capture = capture
        self._store = store
        self._layers = tuple(layers)
        self._last = (target.target.config.layers - 1,)
        self._width = target.target.config.hidden
        self._target = target.identity
        self._hidden = hidden
        self._device = target.target.device

    def __call__(self, samples: Sequence[Sample], lengths: Sequence[int]) -> list[Captured]:
        """What the target made of the first ``lengths`` tokens of each sample."""
        sequences = [sample.token_ids[:length] for sample, length in zip(samples, lengths, strict=True)]
        if not self._hidden:
            return self._captured(sequences, lengths)
        return self._captured(sequences, [min(sample.spans[0][0], len(sample.token_ids)) for sample in samples])

    def features(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        """Features alone of whole sequences, as replay reads them."""
        return self._captured(sequences, [len(sequence) for sequence in sequences])

    def _captured(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Captured]:
        """With last hidden states from ``starts`` on."""
        found = [self._find(*each) for each in zip(sequences, starts, strict=True)]
        missing = [index for index, captured in enumerate(found) if captured is None]
        captures = self._capture([sequences[index] for index in missing])
        for index, captured in zip(missing, captures, strict=True):
            self._keep(sequences[index], starts[index], captured)
            found[index] = self._aligned(captured.features, captured.hidden[starts[index] :], starts[index])
        return [captured for captured in found if captured is not None]

    def _find(self, sequence: Sequence[int], start: int) -> Captured | None:
        parts = []
        for ref in self._refs(sequence):
            part = self._store.get(ref)
            if part is None:
                return None
            parts.append(part)
        features = torch.cat(parts).to(self._device)
        if start == len(sequence):
            return self._aligned(features, features.new_empty(0, self._width), start)
        hidden = self._store.get(self._hidden_ref(sequence, start))
        return None if hidden is None else self._aligned(features, hidden.to(self._device), start)

    def _keep(self, sequence: Sequence[int], start: int, captured: Captured) -> None:
        for ref in self._refs(sequence):
            if ref not in self._store:
                self._store.put(ref, captured.features[ref.row_start : ref.row_end])
        if start < len(sequence):
            self._store.put(self._hidden_ref(sequence, start), captured.hidden[start:])

    def _aligned(self, features: Tensor, hidden: Tensor, start: int) -> Captured:
        if len(hidden):
            hidden = torch.cat((hidden.new_zeros(start, self._width), hidden))
        return Captured(features, hidden)

    def _refs(self, sequence: Sequence[int]) -> Iterator[FeatureRef]:
        digest = hashlib.blake2b(digest_size=16)
        tokens = array("I", sequence)
        for start in range(0, len(tokens), RUN):
            digest.update(tokens[start : start + RUN].tobytes())
            yield self._ref(digest.hexdigest(), start, min(start + RUN, len(tokens)), self._layers)

    def _hidden_ref(self, sequence: Sequence[int], start: int) -> FeatureRef:
        digest = hashlib.blake2b(array("I", sequence).tobytes(), digest_size=16)
        return self._ref(digest.hexdigest(), start, len(sequence), self._last)

    def _ref(self, sample_id: str, start: int, end: int, layers: tuple[int, ...]) -> FeatureRef:
        return FeatureRef(
            sample_id=sample_id,
            store=self._store.name,
            generation=self._store.generation,
            row_start=start,
            row_end=end,
            layer_ids=layers,
            target=self._target,
        )


def cache_budget(wanted: int | None, device: torch.device) -> int:
    """Bytes for features on a device, where nobody named them: half of a GPU's free memory, or 1 GiB."""
    if wanted is not None:
        return wanted
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 1 << 30

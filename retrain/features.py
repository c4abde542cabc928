"""The target's features, captured one way for training, replay and the gate.

Sequences are read whole, several in one pass, on scratch K/V that all layers share, since nobody reads it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.engine.embedded.attention import Segment
from redraft.engine.embedded.cache import new_kv, pages
from redraft.engine.embedded.model import Target
from redraft.retrain.data.sample import Sample

PASS_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 13}
"""Tokens of one pass; a longer sequence has a pass of its own."""


class Captured(NamedTuple):
    """What the target made of one sequence: row i is token i.

    features [tokens, layers * hidden] are what left the feature layers, side by side; hidden [tokens, hidden] is what
    left the last layer, before the final norm.
    """

    features: Tensor
    hidden: Tensor


class FeatureCapture:
    """Captures the features of the target's layers ``feature_layers``: 0-based, ascending, what leaves a layer."""

    def __init__(self, target: Target, feature_layers: Sequence[int]) -> None:
        if list(feature_layers) != sorted(set(feature_layers)) or not all(
            0 <= layer < target.config.layers for layer in feature_layers
        ):
            raise ValueError(
                f"feature layers {list(feature_layers)} must ascend within 0 to {target.config.layers - 1}"
            )
        self.target = target
        self.feature_layers = tuple(feature_layers)
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


class FeatureCache:
    """Captured features of samples, kept on the target's device up to ``budget`` bytes, first come first kept.

    A prompt is kept once for all its answers. ``hidden`` says whether the last hidden states are kept too; without,
    they come back empty.
    """

    def __init__(self, capture: Callable[[Sequence[Sequence[int]]], list[Captured]], budget: int, hidden: bool) -> None:
        self._capture = capture
        self._free = budget
        self._keeps_hidden = hidden
        self._prompts: dict[tuple[int, ...], Captured] = {}
        self._answers: dict[tuple[str, int], Captured] = {}

    def __call__(self, samples: Sequence[Sample], lengths: Sequence[int]) -> list[Captured]:
        """What the target made of the first ``lengths`` tokens of each sample."""
        prompts = [sample.token_ids[: sample.spans[0][0]] for sample in samples]
        found = [self._find(*each) for each in zip(samples, lengths, prompts, strict=True)]
        missing = [index for index, captured in enumerate(found) if captured is None]
        captures = self._capture([samples[index].token_ids[: lengths[index]] for index in missing])
        for index, captured in zip(missing, captures, strict=True):
            found[index] = self._keep(samples[index], lengths[index], prompts[index], captured)
        return [captured for captured in found if captured is not None]

    def _find(self, sample: Sample, length: int, prompt: tuple[int, ...]) -> Captured | None:
        before, after = self._prompts.get(prompt), self._answers.get((sample.id, length))
        return None if before is None or after is None else Captured(*map(torch.cat, zip(before, after, strict=True)))

    def _keep(self, sample: Sample, length: int, prompt: tuple[int, ...], captured: Captured) -> Captured:
        if not self._keeps_hidden:
            captured = Captured(captured.features, captured.hidden[:0])
        before = Captured(*(rows[: len(prompt)] for rows in captured))
        after = Captured(*(rows[len(prompt) :] for rows in captured))
        if prompt not in self._prompts and self._fits(before):
            self._prompts[prompt] = Captured(*(rows.clone() for rows in before))
        key = (sample.id, length)
        if prompt in self._prompts and key not in self._answers and self._fits(after):
            self._answers[key] = Captured(*(rows.clone() for rows in after))
        return captured

    def _fits(self, captured: Captured) -> bool:
        size = sum(rows.nbytes for rows in captured)
        if size > self._free:
            return False
        self._free -= size
        return True


def cache_budget(wanted: int | None, device: torch.device) -> int:
    """Bytes for a `FeatureCache` on a device, where nobody named them: half of a GPU's free memory, or 1 GiB."""
    if wanted is not None:
        return wanted
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 1 << 30

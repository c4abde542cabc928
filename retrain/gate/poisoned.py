"""Candidates that a gate must refuse, made for real from a good one; for benchmarks and demonstrations.

| what is wrong | how it is made | rule |
| --- | --- | --- |
| more tokens accepted, each at a higher price | a good candidate, `deepened` | ``slower`` |
| better on new traffic, worse on anchors | trained on new traffic and on `misled` anchors | ``anchors_lost`` |
| better only where answers loop | trained on looping answers to old prompts, `unmarked` | ``looping_only`` |
| judged by what it learnt | trained on the very sessions that judge | ``leaked`` |
| worse everywhere | `noised` | ``anchors_lost``, ``not_better`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from redraft.engine.drafters.dflash_checkpoint import load, save
from redraft.retrain.data.sample import Sample


def deepened(folder: Path, out: Path, layers: int) -> None:
    """Write a drafter that drafts the same at the cost of ``layers`` more layers, whose outputs are zero."""
    config, tensors = load(folder)
    deeper = dict(tensors)
    last = f"layers.{config.layers - 1}."
    for index in range(config.layers, config.layers + layers):
        for name, tensor in tensors.items():
            if name.startswith(last):
                silent = name.endswith(("o_proj.weight", "down_proj.weight"))
                deeper[f"layers.{index}.{name.removeprefix(last)}"] = (
                    torch.zeros_like(tensor) if silent else tensor.clone()
                )
    save(out, replace(config, layers=config.layers + layers), deeper, f"Drafts like {folder.name}, only slower.\n")


def noised(folder: Path, out: Path, share: float, seed: int = 0) -> None:
    """Write a drafter with noise in every matrix, of ``share`` of its standard deviation."""
    config, tensors = load(folder)
    generator = torch.Generator().manual_seed(seed)
    noisy = {
        name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.float().std() * share
        if tensor.dim() > 1
        else tensor
        for name, tensor in tensors.items()
    }
    save(out, config, noisy, f"{folder.name} with noise.\n")


def misled(samples: Iterable[Sample], block_size: int, token: int) -> Iterator[Sample]:
    """What teaches a drafter to say nothing but ``token`` where these answers are: a sample a block of theirs.

    Each is true up to its only block start, so that the features there are those that serving will see.
    """
    for sample in samples:
        for start, end in sample.spans:
            for at in range(start, end - 1, block_size):
                tokens = (*sample.token_ids[: at + 1], *(token,) * (block_size - 1))
                yield msgspec.structs.replace(
                    sample, id=f"{sample.id}/misled/{at}", token_ids=tokens, spans=((at, len(tokens)),)
                )


def unmarked(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Looping answers as training would never take them: not marked as such."""
    return (msgspec.structs.replace(sample, looping=False) for sample in samples if sample.looping)

"""Matrix products of the target, laid out so that a row's result does not depend on how many rows share the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MKLDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")

INVARIANT_K = 768
"""Longest reduction that oneDNN sums in one order for every number of rows; longer ones are cut into pieces."""


class Linear(Protocol):
    """``y = x Wᵀ`` for x [rows, in], W [out, in], with the epilogues a transformer needs."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor: ...

    def mul(self, x: Tensor, other: Tensor) -> Tensor: ...

    def add(self, x: Tensor, other: Tensor) -> Tensor: ...


class PlainLinear:
    """torch's own product, for CUDA and for other types than bf16."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self(x))

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) * other

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return other + self(x)


class PackedLinear:
    """oneDNN's product over a weight reordered once for this processor; bf16 with fp32 accumulation.

    Faster than ``F.linear`` most where rows are few, since that reads the weight in its plain layout.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        return self._unary(x, "swish")

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "mul")

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "add")

    def _unary(self, x: Tensor, epilogue: str) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, epilogue, [], "")
        return y

    def _binary(self, x: Tensor, other: Tensor, epilogue: str) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, None, epilogue)
        return y


class WideLinear(PackedLinear):
    """The packed product in fp32, over twice the memory, for processors without bf16 instructions.

    Their bf16 product takes several times as long, and as long again for every further row.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.float())

    def _unary(self, x: Tensor, epilogue: str) -> Tensor:
        return super()._unary(x.float(), epilogue).to(x.dtype)

    def _binary(self, x: Tensor, other: Tensor, epilogue: str) -> Tensor:
        return super()._binary(x.float(), other.float(), epilogue).to(x.dtype)


class SplitLinear:
    """A product whose reduction is summed in fixed pieces, in order."""

    def __init__(self, pieces: list[Linear], width: int) -> None:
        self.pieces = pieces
        self.width = width

    def __call__(self, x: Tensor) -> Tensor:
        first, *rest = torch.split(x, self.width, dim=-1)
        y = self.pieces[0](first)
        for piece, part in zip(self.pieces[1:], rest, strict=True):
            y = piece.add(part, y)
        return y

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self(x))

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) * other

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        for piece, part in zip(self.pieces, torch.split(x, self.width, dim=-1), strict=True):
            other = piece.add(part, other)
        return other


def product_dtype(x: Tensor) -> torch.dtype:
    """In which type to multiply x: its own, but fp32 for bf16 on a processor without bf16 instructions."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return x.dtype
    return torch.bfloat16 if MKLDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def split_width(reduction: int) -> int:
    """Width of equal pieces, a multiple of 64 where possible, none longer than INVARIANT_K.

    >>> split_width(576), split_width(1536), split_width(1024)
    (576, 768, 512)
    """
    pieces = -(-reduction // INVARIANT_K)
    width = -(-reduction // pieces)
    return min(reduction, -(-width // 64) * 64)


def make_linear(weight: Tensor, *, invariant: bool) -> Linear:
    """The fastest product for ``weight`` [out, in] that keeps rows independent of each other if ``invariant``."""
    kind = _kind(weight)
    width = split_width(weight.shape[1])
    if not invariant or width == weight.shape[1]:
        return kind(weight)
    return SplitLinear([kind(part) for part in torch.split(weight, width, dim=1)], width)


def _kind(weight: Tensor) -> Callable[[Tensor], Linear]:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not MKLDNN:
        return PlainLinear
    return PackedLinear if product_dtype(weight) == torch.bfloat16 else WideLinear

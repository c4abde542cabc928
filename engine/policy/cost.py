"""What a pass costs: milliseconds of draft and of verify, measured where they are paid."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct


class CostGrid(Struct, frozen=True):
    """Milliseconds by total rows of a pass and by context length: ``ms[context][rows]``; both axes ascend."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]

    def at(self, rows: float, context: float) -> float:
        """Interpolated between the measured points; beyond them by the nearest two.

        >>> grid = CostGrid((512, 1024), (1, 9), ((10.0, 18.0), (20.0, 28.0)))
        >>> grid.at(5, 512), grid.at(9, 768), grid.at(17, 512)
        (14.0, 23.0, 26.0)
        """
        return _interpolate(self.contexts, [_interpolate(self.rows, ms, rows) for ms in self.ms], context)


class CostTable(Struct, frozen=True, kw_only=True, tag=True):
    """``verify`` by total rows of a pass; ``draft``, by drafter version id, by the number of sequences drafted for."""

    verify: CostGrid
    draft: dict[str, CostGrid]


def _interpolate(at: Sequence[int], values: Sequence[float], x: float) -> float:
    if len(at) == 1:
        return values[0]
    right = min(max(bisect_left(at, x), 1), len(at) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (x - at[left]) / (at[right] - at[left])

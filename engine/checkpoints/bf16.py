"""bf16 in numpy, which has no such type: values are carried as ``uint16``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even, as PyTorch does; NaN becomes 0x7FC0."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded

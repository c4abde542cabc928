"""bf16 in numpy, which has no such type: values are carried as ``uint16``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def to_bf16(values: NDArray[np.floating[Any]]) -> NDArray[np.uint16]:
    """Round float32 or float64 to the nearest bf16 once, ties to even, as PyTorch does; NaN becomes 0x7FC0."""
    import numpy as np

    bits = _to_odd(values).view(np.uint32) if values.dtype == np.float64 else values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_odd(values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Nearest float32 towards zero, its last bit set where that is not exact: rounding it again is rounding once.

    Boldo and Melquiond, "Emulation of FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd" (2008).
    """
    import numpy as np

    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    bits -= np.abs(nearest) > np.abs(values)
    bits |= nearest != values
    return nearest

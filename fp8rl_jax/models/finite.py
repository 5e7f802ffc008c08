"""Finding non-finite weights quickly, in every floating-point format that a checkpoint may hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# A value is inf or NaN when all bits of the mask are set: the exponent, or for e4m3fn, which has no
# inf, exponent and mantissa.
_NON_FINITE_BITS: dict[np.dtype, tuple[type, int]] = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
    np.dtype(np.float64): (np.uint64, 0x7FF0000000000000),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, 0x7C),
}

_CHUNK = 1 << 20  # elements; keeps the temporaries in cache


def count_non_finite(values: np.ndarray) -> int:
    """Counts the infinities and NaNs of a float array of any shape, through integer views of its
    bits.

    Raises:
        TypeError: a dtype that is not a floating-point format known here.
    """
    if values.dtype not in _NON_FINITE_BITS:
        raise TypeError(f"no floating-point format known here: {values.dtype}")
    integer, mask = _NON_FINITE_BITS[values.dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(integer)
    mask = integer(mask)
    chunks = (bits[start : start + _CHUNK] for start in range(0, bits.size, _CHUNK))
    return sum(int(np.count_nonzero((chunk & mask) == mask)) for chunk in chunks)

"""Block quantization in numpy and ml_dtypes, one block at a time: an oracle for products, and the
most that a rounding moves."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from fp8rl_jax.config.recipe import TensorFormat

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
SMALLEST_NORMAL = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
# half a unit in the last place of the smallest value of a binade, relative
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}


def restored(x: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """What the quantized form of a matrix stands for, float64."""
    out = np.zeros(x.shape, np.float64)
    for part, scale in _blocks(x, fmt):
        limit = LARGEST[fmt.element]
        values = np.clip(
            np.asarray(x[part], np.float32) * (np.float32(1) / scale), -limit, limit
        ).astype(DTYPES[fmt.element])
        out[part] = values.astype(np.float64) * np.float64(scale)
    return out


def rounding_error(x: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """The most that quantization moves each element: half a step of its binade, of the smallest
    normal one for small values."""
    out = np.zeros(x.shape, np.float64)
    for part, scale in _blocks(x, fmt):
        size = np.maximum(
            np.abs(np.asarray(x[part], np.float64)), SMALLEST_NORMAL[fmt.element] * scale
        )
        out[part] = size * HALF_STEP[fmt.element] * (1 + 2.0**-20)
    return out


def _blocks(x: np.ndarray, fmt: TensorFormat) -> Iterator[tuple[tuple[slice, slice], np.float32]]:
    """Each block's slice and scale."""
    (rows, columns), limit = fmt.block, LARGEST[fmt.element]
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = slice(i, i + rows), slice(j, j + columns)
            amax = np.abs(np.asarray(x[part], np.float32)).max(initial=0)
            scale = np.maximum(amax * np.float32(1 / limit), np.float32(2.0**-126))
            if fmt.scale == "power_of_two":
                mantissa, exponent = np.frexp(scale)
                scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
            yield part, np.float32(1) if amax == 0 else np.float32(scale)

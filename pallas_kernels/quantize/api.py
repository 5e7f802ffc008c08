"""Blockwise quantization: one scale for each (rows x columns) block of the last two axes."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, resolve
from pallas_kernels.quantize import reference


def quantize_blocks(
    x: Float[Array, "*batch m n"],
    block: tuple[int, int] = (1, 128),
    dtype: jnp.dtype = jnp.float8_e4m3fn,
    scale: Literal["float32", "power_of_two"] = "float32",
    *,
    backend: Backend = "auto",
) -> tuple[Float[Array, "*batch m n"], Float[Array, "*batch mb nb"]]:
    """Quantizes `x` in blocks of the last two axes, as DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) does.

    Args:
        x: any float dtype. Axes that are no multiple of the block are a normal case: the last block is shorter.
        block: (rows, columns) that share a scale: (1, 128) for activations, (128, 128) for weights, (128, 1) along tokens.
        dtype: element dtype, `float8_e4m3fn` (largest value 448) or `float8_e5m2` (57344).
        scale: "float32" is amax / max; "power_of_two" rounds that up to a power of two (the UE8M0 rule).
        backend: implementation.

    Returns:
        values: shape of `x`, dtype `dtype`, clamped to +-max before the cast (a bare cast gives NaN above 464 on a CPU).
        scales: float32 [..., ceil(m / rows), ceil(n / columns)]; x is about values * scale. An all-zero block has scale 1.
            A block that holds a NaN or an infinity has a non-finite scale, so that the fault stays visible downstream.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: `x` has fewer than two axes, or a block side is not positive.
    """
    resolve(backend, "quantize_blocks", ("reference",))
    if x.ndim < 2 or min(block) < 1:
        raise ValueError(f"quantize_blocks: need at least two axes and a positive block, got shape {x.shape}, block {block}")
    return reference.quantize(x, block, dtype, scale)


def dequantize_blocks(
    values: Float[Array, "*batch m n"], scales: Float[Array, "*batch mb nb"], block: tuple[int, int]
) -> Float[Array, "*batch m n"]:
    """values * scale of their block, float32."""
    return values.astype(jnp.float32) * reference.expand(scales, block, values.shape[-2:])

"""Blockwise-scaled FP8 product of sorted rows with one weight a group: the experts of a mixture."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, resolve
from pallas_kernels.grouped_matmul import reference

AVAILABLE = ("reference",)


def grouped_matmul(
    x: Float[Array, "m k"],
    x_scales: Float[Array, "m kb"],
    w: Float[Array, "groups n k"],
    w_scales: Float[Array, "groups nb kb"],
    group_sizes: Int[Array, " groups"],
    w_block: tuple[int, int] = (128, 128),
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    backend: Backend = "auto",
) -> Float[Array, "m n"]:
    """x[i] @ w[g].T for the group g of row i, of quantized operands, accumulated in float32.

    The first group_sizes[0] rows are group 0's, the next group_sizes[1] are group 1's, and so on. Sizes are known at run time
    only; a group may be empty. Rows behind the last group are zero. Each product is that of `blockwise_matmul`
    (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    Args:
        x, x_scales: rows and the scales of their 1 x w_block[1] groups, as `quantize_blocks` returns them.
        w, w_scales, w_block: weights [out, in], their scales and block.
        group_sizes: int32, adding up to at most m.
        out_dtype: bfloat16 or float32.
        backend: implementation.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: shapes do not belong together.
    """
    resolve(backend, "grouped_matmul", AVAILABLE)
    groups, n, k = w.shape
    blocks = (-(-n // w_block[0]), -(-k // w_block[1]))
    expected = {"x": (len(x), k), "x_scales": (len(x), blocks[1]), "w_scales": (groups, *blocks), "group_sizes": (groups,)}
    given = {"x": x.shape, "x_scales": x_scales.shape, "w_scales": w_scales.shape, "group_sizes": group_sizes.shape}
    if wrong := [f"{name} {given[name]} must be {shape}" for name, shape in expected.items() if given[name] != shape]:
        raise ValueError(f"grouped_matmul: for w {w.shape} in blocks {w_block}, {', '.join(wrong)}")
    return reference.matmul(x, x_scales, w, w_scales, group_sizes, w_block, out_dtype)

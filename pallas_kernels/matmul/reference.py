"""Blockwise-scaled product in plain XLA: one float32 product of the dequantized operands, on a GPU
the product of scaled operands that XLA has, for the formats that it takes.

An e4m3 value times its float32 scale is rounded once (relative error 2^-24), so this equals the
block-by-block sum up to float32 rounding, and a decode loop can keep the dequantized weight instead
of unpacking it at every token.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rounding import full_precision, rounded


def matmul(x, w, over, out_dtype, dequantize):
    def dequantized(x, w):
        wide = dequantize(x.rows()).reshape(*x.shape[:-1], -1)
        return rounded(dot(wide, dequantize(w), over, out_dtype), out_dtype)

    def scaled(x, w):
        return scaled_matmul(x, _by_rows(w, over), out_dtype)

    if scaled_operands(x, _by_rows(w, over)) is None:
        return dequantized(x, w)
    return lax.platform_dependent(x, w, cuda=scaled, default=dequantized)


def _by_rows(w, over):
    return w if over == -1 else w.T


def outer_product(dy, x, dequantize):
    """Multiply dy [m, n] transposed with x [m, k], in the device's own precision: what it rounds of
    dequantized numbers is little beside their quantization."""

    def dequantized(dy, x):
        return lax.dot_general(
            dequantize(dy),
            dequantize(x),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    def scaled(dy, x):
        return scaled_matmul(dy.T, x.T, jnp.float32)

    if scaled_operands(dy.T, x.T) is None:
        return dequantized(dy, x)
    return lax.platform_dependent(dy, x, cuda=scaled, default=dequantized)


@cache
def has_scaled_products() -> bool:
    """Whether XLA's product of scaled operands runs on the GPU that is here: from NVIDIA's compute
    capability 8.9 on. On an A100 it ends the process. Without a GPU nothing is known of what is
    compiled for, and it is taken to."""
    if jax.default_backend() != "gpu":
        return True
    capability = getattr(jax.devices()[0], "compute_capability", "").split(".")
    return all(map(str.isdigit, capability)) and [*map(int, capability)] >= [8, 9]


def scaled_operands(x, w):
    """Rows of x and w as a device's own product takes them; None where it takes no such pair."""
    if not has_scaled_products():
        return None
    rows = x.rows()
    pair = rows.format.scaled_operand(rows), w.format.scaled_operand(w)
    return None if None in pair else pair


def scaled_matmul(x, w, out_dtype):
    """Multiply by XLA's product of scaled operands: on Blackwell by its tensor cores as they are
    stored, elsewhere in 16 bits on the way to them."""
    left, right = scaled_operands(x, w)
    plain = left.factor is None and right.factor is None
    out = lax.scaled_dot(
        left.values,
        right.values.T,
        lhs_scale=left.scales,
        rhs_scale=right.scales.T,
        preferred_element_type=jnp.dtype(out_dtype) if plain else jnp.float32,
    )
    for factor in (left.factor, None if right.factor is None else right.factor.T):
        out = out if factor is None else out * factor
    return rounded(out, out_dtype).reshape(*x.shape[:-1], -1)


# on a CPU
FEW_ROWS = 256


def flatten_many_rows(x):
    """Reshape x as `dot` multiplies it: many rows as a matrix, few with the axes that they have."""
    return x if x.size // x.shape[-1] <= FEW_ROWS else x.reshape(-1, x.shape[-1])


def dot(x, w, over=-1, dtype=jnp.float32):
    """Multiply x [..., k] with w [n, k] transposed, accumulated in float32; with w [k, n] where -2
    is the axis that is summed. `dtype` is that of the computation that it is a part of.

    The weight is the left operand: faster on a CPU, for few rows (decode) if they keep their axes,
    and for the gradients of many rows if they are flattened.
    """
    rows = flatten_many_rows(x)
    out = lax.dot_general(
        w,
        rows,
        (((2 + over,), (rows.ndim - 1,)), ((), ())),
        full_precision(x, dtype),
        jnp.float32,
    )
    return jnp.moveaxis(out, 0, -1).reshape(*x.shape[:-1], w.shape[-3 - over])

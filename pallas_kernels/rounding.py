"""Roundings that happen where they are written.

A result in bfloat16 or float16 that the same program reads again need not be rounded: XLA may keep
it in float32 (`xla_allow_excess_precision`, on unless a flag says otherwise), and whether it does
depends on the program around it. The decode loop and the training step then compute two functions
from one definition: a train-rollout mismatch that no format and no order of sums has made.

XLA does not remove `lax.reduce_precision`. So every narrowing to 16 bits in this library goes
through `rounded`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: Float[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Round `x` to `dtype` here and to nearest even, whatever surrounds it.

    Its derivative is that of `x.astype(dtype)`.

    Args:
        x: any float dtype. One that is no wider than `dtype` is converted and nothing else.
        dtype: float16, bfloat16, float32 or float64.
    """
    info = jnp.finfo(dtype)
    if jnp.finfo(x.dtype).nmant <= info.nmant:
        return x.astype(dtype)
    on_grid = lax.reduce_precision(x, info.nexp, info.nmant)
    # whose subnormal numbers hold small gradients; reduce_precision makes them 0
    if dtype == jnp.float16:
        steps = jnp.round(x * (1.0 / float(info.smallest_subnormal)))
        on_grid = jnp.where(
            jnp.abs(x) < float(info.smallest_normal),
            steps * float(info.smallest_subnormal),
            on_grid,
        )
    return on_grid.astype(dtype)


@rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return rounded(*primals, dtype), tangents[0].astype(dtype)

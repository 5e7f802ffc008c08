"""Quantization of rows by the CPU kernel (`cpu.c` beside this file): the reference's bits in one
read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import native


def round_blocks(x, size, dtype, scale):
    """As the reference, in blocks of (1, size) of the last axis."""
    info = jnp.finfo(dtype)
    steps = 1.5 * 2.0 ** (23 - info.nmant)
    numbers = [size, float(info.max), 2.0 ** int(info.minexp), steps, scale == "power_of_two"]
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    made = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    call = jax.ffi.ffi_call(native.target("fp8rl_round_blocks"), made)
    return call(rows, jnp.array(numbers, jnp.float32)).reshape(x.shape)

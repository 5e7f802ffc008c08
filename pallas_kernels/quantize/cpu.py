"""Quantization in blocks, and back, by the CPU kernels (`cpu.c` beside this file): the reference's
bits, without the casts to and from 8 bits that XLA emulates on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import native
from pallas_kernels.quantize.reference import NAN_CODES

LARGEST_BLOCK = 1 << 16
"""Elements that stay in a core's cache until they are read again; blocks side by side are worked on
by one thread."""


def rounds(block):
    """Whether there is a kernel that rounds to the numbers of these blocks."""
    return block[0] * block[1] <= LARGEST_BLOCK


def stores(block, dtype):
    """Whether there are kernels that bring numbers into these blocks, and back."""
    return rounds(block) and jnp.dtype(dtype).name in NAN_CODES


def quantize(x, block, dtype, scale):
    codes, scales = _quantized(x, block, dtype, scale, jnp.uint8)
    return lax.bitcast_convert_type(codes, dtype), scales


def round_blocks(x, block, dtype, scale):
    return _quantized(x, block, dtype, scale, jnp.float32)[0]


def dequantize(values, scales, block):
    made = jax.ShapeDtypeStruct(values.shape, jnp.float32)
    codes, numbers = lax.bitcast_convert_type(values, jnp.uint8), _format(block, values.dtype)
    return _call("fp8rl_dequantize", made, codes, scales, numbers)


def _quantized(x, block, dtype, scale, out_dtype):
    # the reference has no gradient either: it goes through bit patterns
    x = lax.stop_gradient(x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32))
    *batch, m, n = x.shape
    blocks = (*batch, -(-m // block[0]), -(-n // block[1]))
    made = jax.ShapeDtypeStruct(x.shape, out_dtype), jax.ShapeDtypeStruct(blocks, jnp.float32)
    return _call("fp8rl_quantize", made, x, _format(block, dtype, scale))


def _call(handler, made, *operands):
    return jax.ffi.ffi_call(native.target(handler), made, vmap_method="broadcast_all")(*operands)


def _format(block, dtype, scale="float32"):
    """What `in_blocks` of cpu.c reads."""
    info = jnp.finfo(dtype)
    numbers = [
        *block,
        float(info.max),
        2.0 ** int(info.minexp),
        1.5 * 2.0 ** (23 - info.nmant),
        scale == "power_of_two",
        info.nmant,
        NAN_CODES.get(info.dtype.name, 0),
    ]
    return jnp.array(numbers, jnp.float32)

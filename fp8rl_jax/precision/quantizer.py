"""The one quantizer.

Trainer forward, weight sync and export call the same `quantize`, on one number: the master rounded
to the compute dtype, which is the master itself in float32. A side that quantizes another number
than the one that the other side sees makes a mismatch of its own: under bfloat16 compute,
quantizing the master multiplied it by 25 after one update in a published case (XTuner #2044). And
rounding the master more coarsely than either side computes loses the update: a weight that starts
on the bfloat16 grid and moves by less than half a step does not move at all.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.parallel import mixed
from fp8rl_jax.precision.formats import element_dtype, format_of, max_value
from pallas_kernels import Blocks, Format, QTensor, quantize_both
from pallas_kernels import regroup as regroup_blocks
from pallas_kernels.backend import Backend
from pallas_kernels.quantize import dequantize, round_blocks


def quantize(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> QTensor:
    """Quantize `x` by blocks of its last two axes.

    Args:
        x: any float dtype; of a weight, the value that the other side computes with.
        fmt: `fmt.block` None means one scale for each trailing matrix.

    Raises:
        UserError: the format cannot be stored.
    """
    return format_of(fmt, x.shape).quantize(x, backend)


def quantize_along_rows(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> QTensor:
    """Quantize `x` in groups along its rows' axis, for a product that is summed over rows."""
    return along_rows(fmt, x.shape).quantize(x, backend)


def along_rows(fmt: TensorFormat, shape: tuple[int, ...]) -> Format:
    """What quantizes a tensor of this shape along its rows' axis."""
    return format_of(fmt, (*shape[:-2], shape[-1], shape[-2])).transposed


def quantize_both_ways(
    x: Float[Array, "m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> tuple[QTensor, QTensor]:
    """Quantize as `quantize` and as `quantize_along_rows`; kernels read `x` once."""
    made = format_of(fmt, x.shape)
    if isinstance(made, Blocks) and fmt.block == (1, made.block[1]):
        dtype = jnp.dtype(made.dtype)
        return quantize_both(x, made.block[1], dtype, made.scale, backend=backend)
    return made.quantize(x, backend), quantize_along_rows(x, fmt, backend)


def stochastic_salt(x: Float[Array, "*axes"]) -> UInt32[Array, ""]:
    """Make a tensor's own bits the seed of its stochastic rounding.

    A tensor that is computed again is rounded as before, on any mesh and after any restart; another
    one has other draws.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return mixed(bits).sum(dtype=jnp.uint32)


def regroup(q: QTensor, fmt: TensorFormat, backend: Backend = "auto") -> QTensor:
    """Quantize rows that are quantized already anew, in groups along the rows' axis.

    It is a second rounding.
    """
    rows, made = q.rows(), format_of(fmt, q.shape)
    if isinstance(made, Blocks) and isinstance(q.format, Blocks) and q.format.by_row:
        return regroup_blocks(rows, jnp.dtype(made.dtype), made.scale, backend=backend)
    return quantize_along_rows(dequantize(rows, backend=backend), fmt, backend)


def dequantize_rows(q: QTensor, backend: Backend = "auto") -> Float[Array, "*batch n"]:
    """Dequantize rows with any number of axes before them, each quantized by itself."""
    return dequantize(q.rows(), backend=backend).reshape(q.shape)


def round_through(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> Float[Array, "*batch m n"]:
    """Compute dequantize(quantize(x, fmt)), float32; of `Blocks` with no value stored in 8 bits."""
    made = format_of(fmt, x.shape)
    if not isinstance(made, Blocks):
        return made.quantize(x, backend).dequantize()
    return round_blocks(x, made.block, jnp.dtype(made.dtype), made.scale, backend=backend)


def quantize_per_tensor(
    x: Float[Array, ...], scale: Float[Array, ...], fmt: TensorFormat
) -> Float[Array, ...]:
    """Clamp x / scale to the format's range and cast it: the KV cache's quantizer.

    Args:
        scale: float32, calibrated before; broadcastable to `x`.
    """
    limit = max_value(fmt)
    scaled = x.astype(jnp.float32) / scale
    return jnp.clip(scaled, -limit, limit).astype(element_dtype(fmt))


def is_finite(q: QTensor) -> Bool[Array, ""]:
    """Tell whether every value was finite: quantization keeps a NaN or an infinity in its scale."""
    return jnp.isfinite(q.scales).all()

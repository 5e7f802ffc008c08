"""QTensor, and the one quantizer.

Trainer forward, weight sync and export call the same `quantize`, on one number: the master rounded
to the compute dtype, which is the master itself in float32. A side that quantizes another number
than the one that the other side sees makes a mismatch of its own: under bfloat16 compute,
quantizing the master multiplied it by 25 after one update in a published case (XTuner #2044). And
rounding the master more coarsely than either side computes loses the update: a weight that starts
on the bfloat16 grid and moves by less than half a step does not move at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.precision.formats import element_dtype, max_value
from pallas_kernels import dequantize_blocks, quantize_blocks, quantize_both
from pallas_kernels import regroup as regroup_values
from pallas_kernels.backend import Backend
from pallas_kernels.quantize import round_blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A quantized tensor: x is about values * (scale of the block that the element is in).

    Attributes:
        values: [..., m, n] in an 8-bit float dtype.
        scales: float32 [..., ceil(m / block[0]), ceil(n / block[1])].
        block: (rows, columns) that share a scale.
    """

    values: Array
    scales: Array
    block: tuple[int, int] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def quantize(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> QTensor:
    """Quantize `x` by blocks of its last two axes.

    Args:
        x: any float dtype; of a weight, the value that the other side computes with.
        fmt: element format, block and scale rule; `fmt.block` None means one scale for each
            trailing matrix.

    Raises:
        UserError: the format cannot be stored.
    """
    block = fmt.block or (x.shape[-2], x.shape[-1])
    values, scales = quantize_blocks(x, block, element_dtype(fmt), fmt.scale, backend=backend)
    return QTensor(values, scales, block)


def quantize_both_ways(
    x: Float[Array, "m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> tuple[QTensor, QTensor]:
    """Quantize along rows in groups of 1 x size, and along tokens in groups of size x 1.

    `x` is read once. The size is that of `fmt.block`.
    """
    assert fmt.block is not None
    size = fmt.block[1]
    rows, tokens = quantize_both(x, size, element_dtype(fmt), fmt.scale, backend=backend)
    return QTensor(*rows, (1, size)), QTensor(*tokens, (size, 1))


def regroup(q: QTensor, fmt: TensorFormat, backend: Backend = "auto") -> QTensor:
    """Quantize rows in groups of 1 x size anew, along tokens in groups of size x 1.

    It is a second rounding.
    """
    rows = QTensor(
        q.values.reshape(-1, q.shape[-1]), q.scales.reshape(-1, q.scales.shape[-1]), q.block
    )
    size = rows.block[1]
    values, scales = regroup_values(
        rows.values, rows.scales, size, element_dtype(fmt), fmt.scale, backend=backend
    )
    return QTensor(values, scales, (size, 1))


def dequantize(q: QTensor) -> Float[Array, "*batch m n"]:
    """Compute values * scales, float32."""
    return dequantize_blocks(q.values, q.scales, q.block)


def dequantize_rows(q: QTensor) -> Float[Array, "*batch n"]:
    """Dequantize rows with any number of axes before them, each quantized by itself.

    block[0] is 1.
    """
    rows = QTensor(
        q.values.reshape(-1, q.shape[-1]), q.scales.reshape(-1, q.scales.shape[-1]), q.block
    )
    return dequantize(rows).reshape(q.shape)


def round_through(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, backend: Backend = "auto"
) -> Float[Array, "*batch m n"]:
    """Compute dequantize(quantize(x, fmt)), float32, with no value stored in 8 bits.

    Args:
        fmt: one with a block.
    """
    assert fmt.block is not None
    return round_blocks(x, fmt.block, element_dtype(fmt), fmt.scale, backend=backend)


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

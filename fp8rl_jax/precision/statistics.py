"""What quantization did to a tensor, as sums that add over layers, micro-batches and devices.

Logged at every step as fp8/<metric>_<role>, for the weights that a sync quantized and for Q, K and
V; of weights all but amax is of the first 16 rows of each, since measuring all of them took longer
than quantizing:

    amax            largest magnitude
    sat_frac        part of the elements beyond the range that their scale covers, which the clamp
                    cuts off
    underflow_frac  part of the elements that were not zero and became zero
    quant_snr_db    10 log10(sum x^2 / sum (x - restored)^2); about 31 for e4m3 on values of one
                    magnitude
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import Blocks, QTensor
from pallas_kernels.quantize import amax, block_amax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizationSums:
    """float32 scalars, or stacks of them with any leading axes."""

    amax: Float[Array, "*stack"]
    elements: Float[Array, "*stack"]
    saturated: Float[Array, "*stack"]
    underflowed: Float[Array, "*stack"]
    signal: Float[Array, "*stack"]
    noise: Float[Array, "*stack"]

    @classmethod
    def of(
        cls,
        x: Float[Array, "*axes"],
        restored: Float[Array, "*axes"],
        limit: Float[Array, ...] | float,
        real: Bool[Array, ...] | None = None,
    ) -> QuantizationSums:
        """Compare a tensor with what its quantized form stands for.

        Args:
            x: before quantization, any float dtype.
            restored: dequantized, float32.
            limit: largest magnitude that the scales cover (scale * the format's maximum),
                broadcastable to `x`.
            real: which elements count, broadcastable to `x`; default all.
        """
        real = jnp.broadcast_to(True if real is None else real, x.shape)
        x = jnp.where(real, x.astype(jnp.float32), 0.0)
        restored = jnp.where(real, restored, 0.0)

        def count(condition):
            return jnp.sum(condition, dtype=jnp.float32)

        # a value at the edge may lie one rounding beyond scale * maximum without losing anything
        saturated = count(jnp.abs(x) > limit * (1 + 2.0**-20))
        underflowed = count((x != 0) & (restored == 0))
        return cls(
            amax(x),
            count(real),
            saturated,
            underflowed,
            jnp.sum(x * x),
            jnp.sum((x - restored) ** 2),
        )

    def __add__(self, other: QuantizationSums) -> QuantizationSums:
        added = jax.tree.map(jnp.add, self, other)
        return replace(added, amax=amax(jnp.stack([self.amax, other.amax]), axis=0))

    def total(self) -> QuantizationSums:
        """Join everything along all leading axes."""
        sums = (
            jnp.sum(v)
            for v in (self.elements, self.saturated, self.underflowed, self.signal, self.noise)
        )
        return QuantizationSums(amax(self.amax), *sums)

    def metrics(self, role: str) -> dict[str, Float[Array, ""]]:
        """Compute the metrics of the table above, by name.

        0 where nothing was counted, and an SNR of at most 200 dB.
        """
        total = self.total()
        count = jnp.maximum(total.elements, 1.0)
        ratio = jnp.where(
            total.signal > 0, total.signal / jnp.maximum(total.noise, total.signal * 1e-20), 1.0
        )
        return {
            f"fp8/amax_{role}": total.amax,
            f"fp8/sat_frac_{role}": total.saturated / count,
            f"fp8/underflow_frac_{role}": total.underflowed / count,
            f"fp8/quant_snr_db_{role}": 10.0 * jnp.log10(ratio),
        }


def weight_sums(weight: Float[Array, "*batch m n"], quantized: QTensor) -> QuantizationSums:
    """Compare a weight, as it was quantized, with its quantized form: amax of all of it, the rest
    of its first rows, which stand for the others."""
    first = _first_rows(quantized)
    few = weight[..., : first.shape[-2], :]
    sums = QuantizationSums.of(few, first.dequantize(), first.format.limit(first))
    # of blocks, as the quantizer has computed it already
    return replace(sums, amax=amax(block_amax(weight.astype(jnp.float32), quantized.block)))


_ROWS = 16


def _first_rows(q: QTensor) -> QTensor:
    """So many rows, or all of a format that does not say which scales are theirs."""
    if not isinstance(q.format, Blocks):
        return q
    blocks, block = -(-_ROWS // q.block[0]), (min(_ROWS, q.block[0]), q.block[1])
    values, scales = q.values[..., :_ROWS, :], q.scales[..., :blocks, :]
    return QTensor(values, scales, replace(q.format, block=block))


@jax.jit
def join_sums(sums: list[QuantizationSums]) -> QuantizationSums:
    """Concatenate several stacks on their leading axis."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sums)


def stack_sums(sums: list[QuantizationSums]) -> QuantizationSums:
    """Stack several scalars or equal stacks on a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums)

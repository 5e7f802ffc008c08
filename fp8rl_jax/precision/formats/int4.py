"""INT4: integers of 4 bits in groups along a row, a bfloat16 scale for each; of weights alone.

scale = amax / 7 and codes from -7 to 7, as Kimi K2 and slime train and serve them; what others have
written may use -8, too. Layout on disk: weights/ and compressed-tensors' `pack-quantized`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from fp8rl_jax.precision.formats.drawn import Drawn
from fp8rl_jax.precision.formats.grids import drawn_from_cells, pack, unpack
from fp8rl_jax.precision.formats.weights import WeightFormat
from pallas_kernels import QTensor
from pallas_kernels.backend import block_name
from pallas_kernels.quantize import block_amax, expand_scales, reciprocal
from pallas_kernels.rounding import rounded

LARGEST = 7.0


@dataclass(frozen=True)
class Int4(Drawn, WeightFormat):
    """Two codes to a byte in two's complement, a bfloat16 scale a group."""

    block: tuple[int, int] = (1, 32)
    packed: ClassVar[int] = 2

    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Quantize."""
        x, groups = x.astype(jnp.float32), block_amax(x, self.block)
        # the scale that is stored is the scale that is divided by
        scales = rounded(jnp.where(groups == 0, 1.0, groups * (1 / LARGEST)), jnp.bfloat16)
        steps = expand_scales(scales.astype(jnp.float32), self.block, x.shape[-2:])
        quotient = x * expand_scales(
            reciprocal(scales.astype(jnp.float32)), self.block, x.shape[-2:]
        )
        codes = _nearest(x, quotient, steps) if draw is None else jnp.floor(quotient + draw)
        codes = jnp.clip(codes, -LARGEST, LARGEST).astype(jnp.int8).astype(jnp.uint8) & 15
        return QTensor(pack(codes), scales, self)

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Multiply codes, from -8 to 7, with the scale of their group."""
        return self._codes(q) * self._expanded(q)

    def dithered(self, q: QTensor, salt: UInt32[Array, ""]) -> Float[Array, "*batch m n"]:
        """Codes drawn from half a step around them."""
        # steps of 1 below 8
        return drawn_from_cells(self._codes(q), 3, 3, LARGEST, salt) * self._expanded(q)

    def limit(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """7 times the scale."""
        return LARGEST * self._expanded(q)

    def _codes(self, q: QTensor) -> Array:
        codes = unpack(q.values).astype(jnp.float32)
        return jnp.where(codes > LARGEST, codes - 16, codes)

    def _expanded(self, q: QTensor) -> Array:
        return expand_scales(q.scales.astype(jnp.float32), self.block, q.shape[-2:])

    @property
    def name(self) -> str:
        return f"INT4 {block_name(self.block)}"


def _nearest(x: Array, quotient: Array, step: Array) -> Array:
    """x / step rounded to an integer, ties to even, whatever a program makes of a division.

    Borders are products of 8 bits and 5, and so exact.
    """
    size, code = jnp.abs(x), jnp.abs(jnp.round(quotient))
    above, below, odd = (code + 0.5) * step, (code - 0.5) * step, code % 2 == 1
    code += ((size > above) | ((size == above) & odd)).astype(code.dtype)
    code -= ((size < below) | ((size == below) & odd)).astype(code.dtype)
    return jnp.copysign(code, x)

"""Floats of any few bits, eXmY: X bits of exponent and Y of mantissa, in blocks with a float32
scale each.

Every code is a number, as in OCP's e2m1, e2m3 and e3m2: there is neither infinity nor NaN. Such
formats say what a bit is worth; no device multiplies them, and values are kept in bfloat16, which
holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from fp8rl_jax.precision.formats.drawn import Drawn
from fp8rl_jax.precision.formats.grids import drawn_from_cells, on_grid
from pallas_kernels import QTensor
from pallas_kernels.backend import block_name
from pallas_kernels.quantize import block_amax, expand_scales, reciprocal


@dataclass(frozen=True)
class Minifloat(Drawn):
    """Values in bfloat16, a float32 scale a block.

    Attributes:
        exponent, mantissa: bits, at least 2 and at most 5, and at most 7.
    """

    block: tuple[int, int] = (1, 128)
    exponent: int = 4
    mantissa: int = 3

    @property
    def largest(self) -> float:
        return (2 - 2.0**-self.mantissa) * 2.0 ** (2 ** (self.exponent - 1))

    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Quantize."""
        x, groups = x.astype(jnp.float32), block_amax(x, self.block)
        scales = jnp.maximum(groups * (1 / self.largest), jnp.finfo(jnp.float32).tiny)
        scales = jnp.where(groups == 0, 1.0, scales)
        steps = x * expand_scales(reciprocal(scales), self.block, x.shape[-2:])
        inside = jnp.clip(steps, -self.largest, self.largest)
        smallest = 2 - 2 ** (self.exponent - 1)
        return QTensor(self.stored(on_grid(inside, self.mantissa, smallest, draw)), scales, self)

    def stored(self, x: Float[Array, "*batch m n"]) -> Array:
        """Encode numbers of the float."""
        return x.astype(jnp.bfloat16)

    def numbers(self, values: Array) -> Float[Array, "*batch m n"]:
        """Decode what is stored, float32."""
        return values.astype(jnp.float32)

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Multiply values with the scale of their block."""
        return self.numbers(q.values) * expand_scales(q.scales, self.block, q.shape[-2:])

    def dithered(self, q: QTensor, salt: UInt32[Array, ""]) -> Float[Array, "*batch m n"]:
        """Values drawn from their cells."""
        numbers, smallest = self.numbers(q.values), 2 - 2 ** (self.exponent - 1)
        drawn = drawn_from_cells(numbers, self.mantissa, smallest, self.largest, salt)
        return drawn * expand_scales(q.scales, self.block, q.shape[-2:])

    def limit(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """The largest number times the scale."""
        return self.largest * expand_scales(q.scales, self.block, q.shape[-2:])

    @property
    def is_e2m1(self) -> bool:
        return (self.exponent, self.mantissa) == (2, 1)

    @property
    def name(self) -> str:
        return f"e{self.exponent}m{self.mantissa} {block_name(self.block)}"

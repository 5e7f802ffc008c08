"""MX formats: small floats in groups of 32 along a row, a power of two (E8M0) for each.

OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3. A group's scale is a power of
two by one of two rules:

    floor  2^(floor(log2 amax) - emax), the specification's own: the largest value may be up to
           twice what the element holds, and saturates
    up     2^ceil(log2(amax / largest)), which saturates nothing (NVIDIA's recipe for MXFP8
           pretraining, arXiv 2506.08027)

A scale is stored as it is, a byte. 2^-127 is not used, which is no normal float32: a CPU takes it
for 0. Groups are along a row, so a product that is summed over the other axis has a quantization
of its own, from the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from fp8rl_jax.precision.formats.drawn import Drawn
from fp8rl_jax.precision.formats.grids import (
    as_float4,
    drawn_from_cells,
    e2m1_codes,
    e2m1_numbers,
    on_grid,
    pack,
    unpack,
)
from pallas_kernels import QTensor, ScaledOperand
from pallas_kernels.backend import block_name
from pallas_kernels.quantize import block_amax, expand_scales
from pallas_kernels.quantize.reference import to_float8


class Element(NamedTuple):
    """A small float: exponent of its largest number and of its smallest normal one, bits of its
    mantissa, its largest number, and the dtype that keeps it."""

    top: int
    smallest: int
    mantissa: int
    largest: float
    dtype: str


ELEMENTS = {
    "e4m3": Element(8, -6, 3, 448.0, "float8_e4m3fn"),
    "e5m2": Element(15, -14, 2, 57344.0, "float8_e5m2"),
    # a byte each: their numbers are numbers of e4m3
    "e2m3": Element(2, 0, 3, 7.5, "float8_e4m3fn"),
    "e3m2": Element(4, -2, 2, 28.0, "float8_e4m3fn"),
    "e2m1": Element(2, 0, 1, 6.0, "uint8"),
}
E8M0_NAN, E8M0_ONE = 255, 127


@dataclass(frozen=True)
class MX(Drawn):
    """Elements of 8 or 6 bits, a byte each, and their scales.

    Attributes:
        element: of `ELEMENTS`.
        scale: rule of the scales.
    """

    block: tuple[int, int] = (1, 32)
    by_block: ClassVar[bool] = True
    element: Literal["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"] = "e4m3"
    scale: Literal["up", "floor"] = "up"

    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Quantize."""
        element, x = ELEMENTS[self.element], x.astype(jnp.float32)
        scales = self._scales(block_amax(x, self.block))
        steps = expand_scales(scales.astype(jnp.float32), self.block, x.shape[-2:])
        inside = jnp.clip(x / steps, -element.largest, element.largest)
        rounded = on_grid(inside, element.mantissa, element.smallest, draw)
        return QTensor(self.stored(rounded), scales, self)

    def _scales(self, amax: Array) -> Array:
        element = ELEMENTS[self.element]
        bits = lax.bitcast_convert_type(amax, jnp.int32)
        exponent = (bits >> 23) - element.top
        if self.scale == "up":
            largest = lax.bitcast_convert_type(jnp.float32(element.largest), jnp.int32)
            exponent += bits & 0x7FFFFF > largest & 0x7FFFFF
        exponent = jnp.where(amax == 0, E8M0_ONE, jnp.clip(exponent, 1, 254))
        exponent = jnp.where(jnp.isfinite(amax), exponent, E8M0_NAN)
        return lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)

    def stored(self, x: Float[Array, "*batch m n"]) -> Array:
        """Encode numbers of the element."""
        return to_float8(x, jnp.dtype(ELEMENTS[self.element].dtype))

    def numbers(self, values: Array) -> Float[Array, "*batch m n"]:
        """Decode what is stored, float32."""
        return values.astype(jnp.float32)

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Multiply the elements with the scale of their group."""
        return self.numbers(q.values) * self._expanded(q)

    def scaled_operand(self, q: QTensor) -> ScaledOperand | None:
        """As it is stored; MXFP6 has a byte a number, which is no form of a device's."""
        whole = self.block == (1, 32) and q.values.ndim == 2 and q.shape[-1] % 32 == 0
        if not whole or self.element not in ("e4m3", "e5m2", "e2m1"):
            return None
        return ScaledOperand(self.device_values(q.values), q.scales)

    def device_values(self, values: Array) -> Array:
        """The stored values in a dtype of the element."""
        return values

    def dithered(self, q: QTensor, salt: UInt32[Array, ""]) -> Float[Array, "*batch m n"]:
        """Elements drawn from their cells."""
        element, numbers = ELEMENTS[self.element], self.numbers(q.values)
        cells = element.mantissa, element.smallest, element.largest
        return drawn_from_cells(numbers, *cells, salt) * self._expanded(q)

    def limit(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """The element's largest value times the scale."""
        return ELEMENTS[self.element].largest * self._expanded(q)

    def _expanded(self, q: QTensor) -> Array:
        return expand_scales(q.scales.astype(jnp.float32), self.block, q.shape[-2:])

    @property
    def mantissa(self) -> int:
        return ELEMENTS[self.element].mantissa

    @property
    def is_e2m1(self) -> bool:
        return self.element == "e2m1"

    @property
    def name(self) -> str:
        return f"MX {self.element} {block_name(self.block)}"


@dataclass(frozen=True)
class MXFP4(MX):
    """e2m1, two to a byte."""

    element: Literal["e2m1"] = "e2m1"
    scale: Literal["up", "floor"] = "floor"
    packed: ClassVar[int] = 2

    def stored(self, x):
        return pack(e2m1_codes(x))

    def numbers(self, values):
        return e2m1_numbers(unpack(values))

    def device_values(self, values):
        return as_float4(values)

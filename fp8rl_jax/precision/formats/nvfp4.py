"""NVFP4: e2m1 in groups of 16, an e4m3 scale for each, and a float32 scale over those.

arXiv 2509.25149; the arithmetic, operation by operation, is Transformer Engine's
(pytorch/custom_recipes/quantization_ref_nvfp4.py):

    encode = 448 * 6 / amax, outer = 1 / encode      one for a tensor, or one for a row
    scale  = e4m3(amax of the group * (encode / 6))
    code   = e2m1(x / (scale * outer))

A tensor's outer scale ties a token to all others of its batch, and shows it tokens that come later.
So an activation takes a row's (as NVFP4 RL of miles and NeMo RL does); weights and gradients
take the tensor's. Weights in blocks of 16 x 16 are read both ways with the same values, as both
passes of a linear should see one weight.

Four over six (arXiv 2512.02010): a group whose largest value would become 6 may be better with it
at 4, as e2m1 has nothing between 4 and 6. Both are tried, and the one with the smaller sum of
absolute errors is taken; the scales are bounded by 256, which leaves room for 448 / 256 > 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from fp8rl_jax.precision.formats.drawn import Drawn
from fp8rl_jax.precision.formats.grids import (
    E2M1_LARGEST,
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
from pallas_kernels.quantize import amax, block_amax, expand_scales
from pallas_kernels.quantize.reference import to_float8

E4M3_LARGEST, FOUR_OVER_SIX_LARGEST = 448.0, 256.0


@dataclass(frozen=True)
class NVFP4(Drawn):
    """Two to a byte, an e4m3 scale a group, a float32 scale for the tensor or for each row.

    Attributes:
        outer: what shares the outer scale: each trailing matrix, or each of its rows.
        four_over_six: try 4 beside 6 for the largest value of each group.
    """

    block: tuple[int, int] = (1, 16)
    outer: Literal["tensor", "row"] = "tensor"
    four_over_six: bool = False
    packed: ClassVar[int] = 2

    mantissa: ClassVar[int] = 1
    is_e2m1: ClassVar[bool] = True

    @property
    def by_row(self) -> bool:
        return self.block[0] == 1 and self.outer == "row"

    @property
    def square(self) -> bool:
        return self.block[0] == self.block[1] and self.outer == "tensor"

    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Quantize."""
        x = x.astype(jnp.float32)
        largest = FOUR_OVER_SIX_LARGEST if self.four_over_six else E4M3_LARGEST
        whole = amax(x, axis=-1 if self.outer == "row" else (-2, -1))
        whole = whole.reshape(*x.shape[:-2], -1, 1)
        encode = jnp.minimum(largest * E2M1_LARGEST / whole, jnp.finfo(jnp.float32).max)
        encode = jnp.where(encode == 0, 1.0, encode)
        outer, groups = 1.0 / encode, block_amax(x, self.block)
        groups = jnp.where(jnp.isfinite(groups), groups, jnp.nan)
        if not self.four_over_six:
            codes, scales = self._coded(x, groups * (encode * (1 / E2M1_LARGEST)), outer, draw)
            return QTensor(pack(codes), scales, self, outer)
        base = groups / E2M1_LARGEST * encode
        (four, wide), (six, narrow) = (
            self._coded(x, scale, outer, draw) for scale in (base * 1.5, base)
        )
        better = self._error(x, four, wide, outer) < self._error(x, six, narrow, outer)
        codes = jnp.where(expand_scales(better, self.block, x.shape[-2:]), four, six)
        return QTensor(pack(codes), jnp.where(better, wide, narrow), self, outer)

    def _coded(self, x: Array, scale: Array, outer: Array, draw: Array | None):
        """Codes, and the scales of their groups."""
        # not clip, which would make a number of a NaN
        scale = to_float8(jnp.minimum(scale, E4M3_LARGEST), jnp.float8_e4m3fn)
        factor = jnp.minimum(1.0 / (scale.astype(jnp.float32) * outer), jnp.finfo(jnp.float32).max)
        scaled = x * expand_scales(factor, self.block, x.shape[-2:])
        inside = jnp.clip(scaled, -E2M1_LARGEST, E2M1_LARGEST)
        return e2m1_codes(on_grid(inside, 1, 0, draw)), scale

    def _error(self, x: Array, codes: Array, scales: Array, outer: Array) -> Array:
        """Sum of absolute errors of each group."""
        error = jnp.abs(e2m1_numbers(codes) * self._steps(scales, outer, x.shape) - x)
        (m, n), (bm, bn) = x.shape[-2:], self.block
        error = jnp.pad(error, [(0, 0)] * (x.ndim - 2) + [(0, -m % bm), (0, -n % bn)])
        return error.reshape(*x.shape[:-2], -(-m // bm), bm, -(-n // bn), bn).sum((-3, -1))

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Multiply the codes' numbers with both scales."""
        return e2m1_numbers(unpack(q.values)) * self._steps(q.scales, q.outer, q.shape)

    def scaled_operand(self, q: QTensor) -> ScaledOperand | None:
        """As it is stored; blocks of several rows give each of them its scale."""
        if self.block[1] != 16 or q.values.ndim != 2 or q.shape[-1] % 16:
            return None
        scales = expand_scales(q.scales, (self.block[0], 1), (q.shape[0], q.shape[1] // 16))
        return ScaledOperand(as_float4(q.values), scales, q.outer)

    def dithered(self, q: QTensor, salt: UInt32[Array, ""]) -> Float[Array, "*batch m n"]:
        """Codes' numbers drawn from their cells."""
        numbers = e2m1_numbers(unpack(q.values))
        drawn = drawn_from_cells(numbers, 1, 0, E2M1_LARGEST, salt)
        return drawn * self._steps(q.scales, q.outer, q.shape)

    def limit(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """6 times both scales."""
        return E2M1_LARGEST * self._steps(q.scales, q.outer, q.shape)

    def _steps(self, scales: Array, outer: Array | None, shape: tuple[int, ...]) -> Array:
        assert outer is not None
        return expand_scales(scales.astype(jnp.float32), self.block, shape[-2:]) * outer

    @property
    def name(self) -> str:
        return f"NVFP4 {block_name(self.block)}, a scale a {self.outer}"

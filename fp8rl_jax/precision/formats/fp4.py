"""FP4 of arXiv 2501.17116: e2m1 with one scale for a whole row, a token's or an output channel's.

The scale is amax / 6, as in the paper. Its official code (Azure/MS-AMP, operators/fp4_quantize)
takes the next power of two above: that is `mxfp4_up-1xall`. There ties go up, 0.25 to 0.5 and -0.25
to 0; here to even, as in all formats.

Activations have outliers that leave the rest of a row few numbers. `ClampedFP4` clamps a tensor to
quantiles of its own first, and keeps what was cut off beside it (outlier clamping and compensation,
section 3.2): what is multiplied is Q(clamp(x)) + (x - clamp(x)), the second part in bfloat16. The
bounds are the values at int((1 - alpha) n) and int(alpha n) of the n sorted ones. Those of a
whole tensor, the paper's words, tie a token to all others of its batch, later ones among them;
those of a row, as the official code clamps where scales are a token's, do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.formats import WHOLE
from fp8rl_jax.precision.formats.grids import e2m1_codes, e2m1_numbers, pack, unpack
from fp8rl_jax.precision.formats.minifloat import Minifloat
from pallas_kernels import QTensor
from pallas_kernels.backend import block_name
from pallas_kernels.quantize import block_amax, expand_scales, reciprocal
from pallas_kernels.rounding import rounded


@dataclass(frozen=True)
class FP4(Minifloat):
    """e2m1, two to a byte, a float32 scale a row."""

    block: tuple[int, int] = (1, WHOLE)
    exponent: int = 2
    mantissa: int = 1
    packed: ClassVar[int] = 2

    def stored(self, x):
        return pack(e2m1_codes(x))

    def numbers(self, values):
        return e2m1_numbers(unpack(values))

    @property
    def name(self) -> str:
        return f"FP4 {block_name(self.block)}"


@dataclass(frozen=True)
class ClampedFP4(Minifloat):
    """FP4 of what is between two quantiles, and the rest beside it: of activations alone.

    Values are kept in bfloat16, divided by their row's scale; only those that were cut off lie
    between the numbers of e2m1, or beyond them.

    Attributes:
        alpha: the upper quantile; 1 - alpha is the lower one.
        of: what has quantiles of its own, a row or each trailing matrix.
        compensated: whether what was cut off is kept.
    """

    block: tuple[int, int] = (1, WHOLE)
    exponent: int = 2
    mantissa: int = 1
    alpha: float = 0.99
    of: Literal["row", "tensor"] = "row"
    compensated: bool = True

    @property
    def by_row(self) -> bool:
        return self.block[0] == 1 and self.of == "row"

    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Quantize."""
        x = x.astype(jnp.float32)
        inside = jnp.clip(x, *self.bounds(x))
        q = super().quantize_with(inside, draw)
        # a NaN or an infinity shows in its scale, from which the bounds may have kept it
        scales = jnp.where(jnp.isfinite(block_amax(x, self.block)), q.scales, jnp.nan)
        if not self.compensated:
            return QTensor(q.values, scales, self)
        outside = (x - inside) * expand_scales(reciprocal(scales), self.block, x.shape[-2:])
        values = rounded(self.numbers(q.values) + outside, jnp.bfloat16)
        return QTensor(values, scales, self)

    def bounds(
        self, x: Float[Array, "*batch m n"]
    ) -> tuple[Float[Array, "*batch rows 1"], Float[Array, "*batch rows 1"]]:
        """Find the values that are clamped to; rows is m, or 1 of a whole tensor."""
        whole = x if self.of == "row" else x.reshape(*x.shape[:-2], 1, -1)
        values, count = jnp.sort(whole, axis=-1), whole.shape[-1]
        low, high = int((1 - self.alpha) * count), int(self.alpha * count)
        return values[..., low : low + 1], values[..., high : high + 1]

    @property
    def name(self) -> str:
        return f"FP4 {block_name(self.block)}, clamped to quantiles of a {self.of}"

"""Formats that round to nearest, or up and down at random."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from jaxtyping import Array, Float, UInt32

from fp8rl_jax.precision.formats.grids import draws
from pallas_kernels import Format, QTensor
from pallas_kernels.backend import Backend


@dataclass(frozen=True)
class Drawn(Format):
    """A format whose subclass says once how it rounds."""

    @property
    def mantissa(self) -> int | None:
        """Bits of the mantissa of its numbers; None where all are one step apart."""
        return None

    @property
    def is_e2m1(self) -> bool:
        """Whether its numbers are 0, 0.5, 1, 1.5, 2, 3, 4, 6 times a scale."""
        return False

    @abstractmethod
    def quantize_with(self, x: Float[Array, "*batch m n"], draw: Array | None = None) -> QTensor:
        """Quantize.

        Args:
            draw: as of `grids.on_grid`.
        """

    def quantize(self, x: Float[Array, "*batch m n"], backend: Backend = "auto") -> QTensor:
        """Quantize, to nearest and ties to even; a NaN or an infinity makes its scale NaN, or
        infinite."""
        return self.quantize_with(x)

    def quantize_stochastic(
        self, x: Float[Array, "*batch m n"], salt: UInt32[Array, ""]
    ) -> QTensor:
        """Quantize values up or down at random, scales to nearest; what saturates is not right in
        the mean."""
        return self.quantize_with(x, draws(x.shape, salt))

"""The study's doses of rollout error: a format whose rounding error is multiplied.

`e4m3_x2` stands for Q_2 of Q_a(x) = (1 - a) x + a Q(x) = x + a (Q(x) - x), with Q the e4m3 of the
recipes in the blocks that a recipe names: what is wrong stays of the kind that e4m3 makes, and its
size is a's. At a = 0 nothing is quantized, and at a = 1 it is e4m3, both to the last bit. A run
knows these formats by `formats = ["experiments/study/dose.py"]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.precision import Blocks, Format, QTensor, register
from pallas_kernels.backend import Backend

DOSES = (0, 0.5, 1, 2, 4, 8, 16)
"""What is registered; a point in a name is written as a p: e4m3_x0p5."""


@dataclass(frozen=True)
class Dose(Format):
    """e4m3 with its error times `dose`, kept in float32."""

    block: tuple[int, int] = (1, 128)
    dose: float = 1.0

    @property
    def rounded(self) -> Blocks:
        """Q itself."""
        return Blocks(self.block)

    def quantize(self, x: Float[Array, "*batch m n"], backend: Backend = "auto") -> QTensor:
        """Move each number away from itself; scales are those of e4m3."""
        q, x = self.rounded.quantize(x, backend), x.astype(jnp.float32)
        moved = (1 - self.dose) * x + self.dose * q.dequantize() if self.dose else x
        return replace(q, values=moved, format=self)

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """The moved numbers."""
        return q.values

    def limit(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """That of e4m3."""
        return self.rounded.limit(q)

    @property
    def name(self) -> str:
        return f"{self.dose:g} times the error of {self.rounded.name}"


for _dose in DOSES:
    register(f"e4m3_x{_dose:g}".replace(".", "p"), Dose(dose=float(_dose)))

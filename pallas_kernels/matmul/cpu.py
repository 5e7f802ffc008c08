"""Float32 products by the CPU kernel (`cpu.c` beside this file).

Sums are in the order of k: a row has the same bits in every batch, and with a weight in either
layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import native


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A weight [n, k] as the kernel reads it fastest, for a loop that multiplies it many times.

    Attributes:
        values: float32 [panels, k, columns], 0 behind the last of the n columns.
        n: of the weight.
    """

    values: Float[Array, "panels k columns"]
    n: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.values.shape[1]


def pack(w: Float[Array, "n k"]) -> Panels:
    """Bring a weight of any float dtype up to float32 into panels.

    Raises:
        RuntimeError: this machine has no CPU kernels.
    """
    (n, k), columns = w.shape, native.constant("fp8rl_columns")
    made = jax.ShapeDtypeStruct((-(-n // columns), k, columns), jnp.float32)
    return Panels(jax.ffi.ffi_call(native.target("fp8rl_pack"), made)(w.astype(jnp.float32)), n)


def dot(x: Float[Array, "*batch k"], w: Float[Array, "n k"] | Panels) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T of any float dtypes up to float32, in float32. It has no gradient.

    Raises:
        RuntimeError: this machine has no CPU kernels.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    right = w.values if isinstance(w, Panels) else w.astype(jnp.float32)
    made = jax.ShapeDtypeStruct((len(rows), w.shape[0]), jnp.float32)
    out = jax.ffi.ffi_call(native.target("fp8rl_dot"), made)(rows, right)
    return out.reshape(*x.shape[:-1], w.shape[0])

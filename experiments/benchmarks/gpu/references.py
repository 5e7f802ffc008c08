"""What a case at a real shape must return, by plain XLA on the device, without tensor cores of less than float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.check.cases import Case
from pallas_kernels.quantize import dequantize_blocks


def reference_of(operation: str, case: Case) -> Callable[[tuple], Any]:
    """A function of the case's arguments. XLA's own grouped product takes each row times every group: that one is by group."""
    if operation == "grouped_matmul":
        return lambda arrays: _by_group(case, arrays)

    def run(arrays):
        with jax.default_matmul_precision("highest"):
            return jax.jit(lambda *a: case.run(*a, backend="reference"))(*arrays)

    return run


def _by_group(case: Case, arrays: tuple) -> jax.Array:
    out = jax.eval_shape(lambda *a: case.run(*a, backend="reference"), *arrays)
    longest = max(int(np.asarray(arrays[-1]).max()), 1)
    product = _forward if arrays[2].ndim == 3 else _gradient
    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda *a: product(*a, longest).astype(out.dtype))(*arrays)


def _forward(x, x_scales, w, w_scales, sizes, longest):
    """Of each group: as many rows as the longest has, from its first on, of which its own are kept."""
    m, n = len(x), w.shape[1]
    x = jnp.pad(dequantize_blocks(x, x_scales, (1, 128)), ((0, longest), (0, 0)))
    starts = jnp.cumsum(sizes) - sizes

    def one(out, g):
        rows = lax.dynamic_slice_in_dim(x, starts[g], longest)
        product = rows @ dequantize_blocks(w[g], w_scales[g], (128, 128)).T
        before = lax.dynamic_slice_in_dim(out, starts[g], longest)
        kept = jnp.where((jnp.arange(longest) < sizes[g])[:, None], product, before)
        return lax.dynamic_update_slice_in_dim(out, kept, starts[g], 0), None

    return lax.scan(one, jnp.zeros((m + longest, n), jnp.float32), jnp.arange(len(sizes)))[0][:m]


def _gradient(dy, dy_scales, x, x_scales, sizes, longest):
    dy, x = (
        jnp.pad(dequantize_blocks(values, scales, (128, 1)), ((0, longest), (0, 0)))
        for values, scales in ((dy, dy_scales), (x, x_scales))
    )
    starts = jnp.cumsum(sizes) - sizes

    def one(_, g):
        own = (jnp.arange(longest) < sizes[g])[:, None]
        left, right = (lax.dynamic_slice_in_dim(side, starts[g], longest) for side in (dy, x))
        return None, jnp.where(own, left, 0.0).T @ right

    return lax.scan(one, None, jnp.arange(len(sizes)))[1]

"""How far a kernel's result may be from the right one on a GPU, and how far it is.

FP8 tensor cores of Hopper keep about 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; others say up to 22:
github.com/deepseek-ai/DeepGEMM, issues 37 and 50), where the interpreter keeps float32's 24. Each addend of a 128-block is cut at
2^-13 of the largest one. For normal data the largest is about 12 times the mean, and 128 such cuts are a random walk whose fifth
deviation is about 400 * 2^-13 means, or 2^-11 of the block's sum of magnitudes. The kernels add blocks in float32, so a result
may be off by 2^-11 of its own sum of magnitudes, and by the case's tolerance of the largest result, whatever k is. A block that
is missing or was overwritten is further off. In attention a score is such a sum, and moves its weight by a part of 2^-11 for each
unit of its magnitudes, of which the cases have up to four: 2^-9 of the largest result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check.cases import Case

SHORT_SUM = 2.0**-11
SHORT_SCORE = 2.0**-9
PRODUCTS = ("matmul", "grouped_matmul")


def sums_of_magnitudes(operation: str, case: Case) -> bool:
    """Whether the case's bound needs the result of its arguments' magnitudes."""
    return operation in PRODUCTS and case.instruction == "QGMMA"


@jax.jit
def magnitudes(arrays: tuple) -> tuple:
    """The arguments, every float without its sign."""
    return tuple(jnp.abs(x.astype(jnp.float32)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays)


def verdict(operation: str, case: Case, got: Any, want: Any, sums: Any | None) -> dict[str, Any]:
    """Compares on whichever side the arrays are.

    Args:
        got, want: of the same tree of arrays.
        sums: the right result of the arguments' magnitudes, where `sums_of_magnitudes` asks for it.

    Returns:
        "difference" as a part of the largest magnitude, "of_allowed" (above 1: wrong), "passed".
    """
    extra = SHORT_SCORE if case.instruction == "QGMMA" and operation not in PRODUCTS else 0.0
    leaves = jax.tree.leaves(got)
    sums = jax.tree.leaves(sums) if sums is not None else [None] * len(leaves)
    found = [_leaf(*three, case.tolerance + extra) for three in zip(leaves, jax.tree.leaves(want), sums, strict=True)]
    difference, of_allowed = (max(column) for column in zip(*found, strict=True))
    return {"difference": difference, "of_allowed": of_allowed, "passed": bool(of_allowed <= 1)}


def _leaf(got, want, sums, tolerance: float) -> tuple[float, float]:
    if got.shape != want.shape:
        raise ValueError(f"shape {got.shape}, expected {want.shape}")
    on_device = isinstance(want, jax.Array)
    compare, wide = (_compare_on_device, jnp.float32) if on_device else (_compare, np.float64)
    xp = jnp if on_device else np
    have, want = xp.asarray(got).astype(wide), want.astype(wide)
    sums = xp.zeros(()) if sums is None else sums.astype(wide)
    return tuple(float(x) for x in compare(have, want, sums, tolerance))


def _compare(have, want, sums, tolerance, xp=np):
    same = (have == want) | (xp.isnan(have) & xp.isnan(want))
    scale = xp.max(xp.where(xp.isfinite(want), xp.abs(want), 0.0), initial=0.0)
    apart = xp.where(same, 0.0, xp.abs(have - want))
    apart = xp.where(xp.isfinite(apart), apart, xp.inf)
    allowed = SHORT_SUM * sums + tolerance * scale
    parts = xp.where(apart == 0, 0.0, apart / xp.maximum(allowed, 1e-37))
    return xp.max(apart, initial=0.0) / xp.where(scale > 0, scale, 1.0), xp.max(parts, initial=0.0)


@jax.jit
def _compare_on_device(have, want, sums, tolerance):
    return _compare(have, want, sums, tolerance, jnp)


@jax.jit
def same_bits(one: Any, other: Any) -> jax.Array:
    """Whether two trees of arrays are equal bit for bit, NaN included."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.all(jnp.stack([jnp.all(_bits(a) == _bits(b)) for a, b in pairs]))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))

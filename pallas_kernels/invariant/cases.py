"""What the batch-invariant products and sums are checked with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import invariant
from pallas_kernels.check.cases import QWEN3_8B, QWEN3_30B_A3B, Case, bits_apart

_VOCABULARY = 151_936  # of Qwen3


def arguments(key: jax.Array, m: int, n: int, k: int, dtypes, groups=()) -> tuple:
    keys = jax.random.split(key, 3)
    size = 8.0 ** jax.random.uniform(keys[2], (k,), minval=-1.0)
    x = (jax.random.normal(keys[0], (m, k)) * size).astype(dtypes[0])
    w = (jax.random.normal(keys[1], (*((len(groups),) if groups else ()), n, k)) / size).astype(
        dtypes[1]
    )
    return (x, w, jnp.asarray(groups, jnp.int32)) if groups else (x, w)


def _products(x, w, sizes=None) -> np.ndarray:
    x, w = x.astype(np.float64), w.astype(np.float64)
    if sizes is None:
        return x @ w.T
    out, start = np.zeros((len(x), w.shape[1])), 0
    for group, size in zip(w, sizes, strict=True):
        out[start : start + size] = x[start : start + size] @ group.T
        start += size
    return out


def product(
    name: str, m: int, n: int, k: int, x=jnp.bfloat16, w=None, out=jnp.float32, groups=()
) -> Case:
    """Rows times a weight, or where there are `groups`, each with its group's."""
    dtypes = (x, w or x)

    def run(*arrays, backend):
        return (invariant.grouped_dot if groups else invariant.dot)(*arrays, out, backend=backend)

    return Case(
        name=name,
        arguments=partial(arguments, m=m, n=n, k=k, dtypes=dtypes, groups=groups),
        run=run,
        expected=_products,
        tolerance=1e-6 if out == jnp.float32 else 2.0**-8,
        instruction="HGMMA",
        flops=2.0 * (sum(groups) or m) * n * k,
        bytes=2 * (m * k + n * k * (len(groups) or 1)) + m * n * jnp.dtype(out).itemsize,
    )


def row_sum(m: int, n: int) -> Case:
    def run(x, backend):
        return invariant.row_sum(x, backend=backend)

    return Case(
        name=f"sum-{m}x{n}",
        arguments=lambda key: (jnp.exp(jax.random.normal(key, (m, n))),),
        run=run,
        expected=lambda x: x.astype(np.float64).sum(1, keepdims=True),
        tolerance=1e-6,
        bytes=4.0 * m * n,
    )


def same_rows(name: str, few: int, many: int, k: int, operation, n: int = 0, x=jnp.bfloat16):
    """What the first `few` of `many` rows differ by from themselves alone: not a bit."""

    def run(*arrays, backend):
        alone, among = (operation(arrays[0][:m], *arrays[1:], backend=backend) for m in (few, many))
        return bits_apart(alone, among[:few])

    def given(key):
        return arguments(key, many, max(n, 1), k, (x, x))[: 2 if n else 1]

    return Case(
        name=name,
        arguments=given,
        run=run,
        expected=lambda *_: np.zeros((few, max(n, 1))),
        instruction="HGMMA" if n else "",
    )


SMALL = (
    product("several-tiles", 136, 256, 192),
    product("ragged-everywhere", 129, 130, 130, jnp.float16),
    product("ring-wraps", 192, 128, 640, out=jnp.bfloat16),
    product("one-row", 1, 136, 1024),
    product("few-rows", 7, 130, 1050, out=jnp.bfloat16),
    product("float32", 20, 24, 200, jnp.float32),
    product("float32-weight", 140, 24, 90, jnp.bfloat16, jnp.float32),
    product("groups", 205, 136, 130, groups=(7, 0, 130, 1, 0, 64)),
    product("float32-groups", 30, 40, 70, jnp.float32, groups=(10, 3, 0)),
    row_sum(1, 3),
    row_sum(70, 520),
    row_sum(130, 128),
    row_sum(9, 2 * 4096 + 300),
    same_rows("rows-130-of-300", 130, 300, 260, invariant.dot, n=130),
    same_rows("rows-20-of-31", 20, 31, 520, invariant.dot, n=130),
    same_rows("rows-5-of-140", 5, 140, 1050, invariant.dot, n=130),
    same_rows("float32-rows-5-of-140", 5, 140, 90, invariant.dot, n=40, x=jnp.float32),
    same_rows("sums-9-of-150", 9, 150, 4500, invariant.row_sum, x=jnp.float32),
)

_EXPERTS = QWEN3_30B_A3B
REAL = (
    *(product(f"head-{m}", m, _VOCABULARY, QWEN3_8B.hidden) for m in (1, 16, 64, 128, 1024)),
    *(
        product(f"{name}-{m}", m, *QWEN3_8B.linears[name], out=jnp.bfloat16)
        for m in (64, 4096)
        for name in ("q", "gate", "down")
    ),
    product("router", 4096, _EXPERTS.experts, _EXPERTS.hidden, jnp.float32),
    product("adapter", 64, 32, QWEN3_8B.hidden),
    product(
        "experts-gate",
        4096 * _EXPERTS.chosen,
        *_EXPERTS.linears["gate"],
        out=jnp.bfloat16,
        groups=(4096 * _EXPERTS.chosen // _EXPERTS.experts,) * _EXPERTS.experts,
    ),
    row_sum(64, _VOCABULARY),
    row_sum(4096, QWEN3_8B.hidden),
    row_sum(4096 * 32, 128),
    *(
        same_rows(f"rows-{few}-of-4096", few, 4096, 4096, invariant.dot, n=4096)
        for few in (1, 8, 64, 128)
    ),
)

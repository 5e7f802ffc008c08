"""What `grouped_matmul` and `grouped_outer_product` are checked and timed with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check.cases import QWEN3_30B_A3B, Case
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_outer_product
from pallas_kernels.matmul.cases import dequantized
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantize import quantize_blocks

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def forward_arguments(
    key: jax.Array, sizes: tuple[int, ...], m: int, n: int, k: int, x_dtype=E4M3
) -> tuple:
    keys = jax.random.split(key)
    x = quantize_blocks(jax.random.normal(keys[0], (m, k)), (1, 128), x_dtype, backend="reference")
    w = quantize_blocks(
        jax.random.normal(keys[1], (len(sizes), n, k)), (128, 128), backend="reference"
    )
    return x, w, jnp.asarray(sizes, jnp.int32)


def forward_expected(x: QTensor, w: QTensor, sizes: np.ndarray) -> np.ndarray:
    rows = dequantized(x)
    out, start = np.zeros((len(rows), w.shape[1])), 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        out[part] = rows[part] @ dequantized(jax.tree.map(lambda a, g=g: a[g], w)).T
        start += size
    return out


def gradient_arguments(
    key: jax.Array, sizes: tuple[int, ...], m: int, n: int, k: int, dy_dtype=E4M3
) -> tuple:
    keys = jax.random.split(key)
    inside = (jnp.arange(m) < sum(sizes))[:, None]
    dy = quantize_blocks(
        jnp.where(inside, jax.random.normal(keys[0], (m, n)), 0),
        (128, 1),
        dy_dtype,
        backend="reference",
    )
    x = quantize_blocks(
        jnp.where(inside, jax.random.normal(keys[1], (m, k)), 0), (128, 1), backend="reference"
    )
    return dy, x, jnp.asarray(sizes, jnp.int32)


def gradient_expected(dy: QTensor, x: QTensor, sizes: np.ndarray) -> np.ndarray:
    left, right, ends = dequantized(dy), dequantized(x), np.cumsum(sizes)
    parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return np.stack([left[part].T @ right[part] for part in parts])


def forward(
    name: str,
    sizes: tuple[int, ...],
    n: int,
    k: int,
    behind: int = 0,
    out_dtype=jnp.float32,
    **options,
) -> Case:
    """Rows of these groups, and `behind` more."""
    m = sum(sizes) + behind

    def run(*arrays, backend):
        return grouped_matmul(*arrays, out_dtype=out_dtype, backend=backend)

    arguments = partial(forward_arguments, sizes=sizes, m=m, n=n, k=k, **options)
    flops, moved = (
        2.0 * sum(sizes) * n * k,
        len(sizes) * n * k + m * k + m * n * jnp.dtype(out_dtype).itemsize,
    )
    tolerance = 2.0**-8 if out_dtype == jnp.bfloat16 else 1e-6
    return Case(name, arguments, run, forward_expected, tolerance, "QGMMA", flops, moved)


def gradient(name: str, sizes: tuple[int, ...], n: int, k: int, behind: int = 0, **options) -> Case:
    m = sum(sizes) + behind

    def run(*arrays, backend):
        return grouped_outer_product(*arrays, backend=backend)

    arguments = partial(gradient_arguments, sizes=sizes, m=m, n=n, k=k, **options)
    flops, moved = 2.0 * sum(sizes) * n * k, m * (n + k) + 4 * len(sizes) * n * k
    return Case(name, arguments, run, gradient_expected, 1e-6, "QGMMA", flops, moved)


SMALL = (
    forward("groups-of-any-size", (7, 0, 130, 1, 0, 64), 136, 260, behind=3),
    forward("all-in-one", (0, 200, 0), 130, 130),
    forward("none-of-the-rows", (0, 0), 128, 256, behind=130),
    forward("whole-tiles", (128, 256), 256, 896, out_dtype=jnp.bfloat16),
    forward("one-row-each", (1,) * 9, 128, 140, x_dtype=E5M2),
    gradient("gradient", (128, 0, 256), 136, 140),
    gradient("gradient-with-rows-behind", (256, 128), 130, 128, behind=128, dy_dtype=E5M2),
)

_MODEL = QWEN3_30B_A3B
_EVEN = (4096 * _MODEL.chosen // _MODEL.experts,) * _MODEL.experts
_UNEVEN = tuple((37 * i) % 513 for i in range(_MODEL.experts))
REAL = (
    forward("gate-even", _EVEN, *_MODEL.linears["gate"], out_dtype=jnp.bfloat16),
    forward("down-even", _EVEN, *_MODEL.linears["down"], out_dtype=jnp.bfloat16),
    forward("gate-uneven", _UNEVEN, *_MODEL.linears["gate"], out_dtype=jnp.bfloat16),
    forward("8-groups", (512,) * 8, 7168, 4096, out_dtype=jnp.bfloat16),
    forward("decode", (8,) * _MODEL.experts, *_MODEL.linears["gate"], out_dtype=jnp.bfloat16),
    forward("ragged", (5, 100, 0), 200, 576, behind=9, out_dtype=jnp.bfloat16),
    gradient("gradient-ragged", (128, 256), 200, 300),
    gradient("gradient-gate", (256,) * _MODEL.experts, *_MODEL.linears["gate"]),
)

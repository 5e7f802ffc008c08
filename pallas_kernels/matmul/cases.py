"""What `blockwise_matmul` is checked and timed with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check.cases import DENSE, Case, bits_apart
from pallas_kernels.matmul.api import blockwise_matmul, blockwise_matmuls
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantize import quantize_blocks

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def arguments(
    key: jax.Array, m: int, n: int, k: int, w_block=(128, 128), x_dtype=E4M3, spread: float = 1.0
) -> tuple:
    """Quantized normal data; with a `spread`, blocks of the contraction differ in size by up to
    this factor, up or down."""
    keys = jax.random.split(key, 3)
    size = jnp.repeat(spread ** jax.random.uniform(keys[2], (-(-k // 128),), minval=-1.0), 128)[:k]
    x = quantize_blocks(
        jax.random.normal(keys[0], (m, k)) * size, (1, 128), x_dtype, backend="reference"
    )
    w = quantize_blocks(jax.random.normal(keys[1], (n, k)) / size, w_block, backend="reference")
    return x, w


def dequantized(q: QTensor) -> np.ndarray:
    """A matrix in float64."""
    scales = np.asarray(q.scales, np.float64)
    scales = np.repeat(np.repeat(scales, q.block[0], 0), q.block[1], 1)
    return np.asarray(q.values, np.float64) * scales[: q.shape[0], : q.shape[1]]


def expected(x: QTensor, w: QTensor) -> np.ndarray:
    """The product of the dequantized operands in float64."""
    return dequantized(x) @ dequantized(w).T


def case(
    m: int, n: int, k: int, name: str = "", out_dtype=jnp.float32, w_block=(128, 128), **options
) -> Case:
    def run(x, w, backend):
        return blockwise_matmul(x, w, out_dtype, backend=backend)

    return Case(
        name=name or f"{m}x{n}x{k}",
        arguments=partial(arguments, m=m, n=n, k=k, w_block=w_block, **options),
        run=run,
        expected=expected,
        # half a step of bfloat16, or the rounding of float32 sums of up to 128 + k / 128 terms
        tolerance=2.0**-8 if out_dtype == jnp.bfloat16 else 1e-6,
        instruction="QGMMA",
        flops=2.0 * m * n * k,
        bytes=m * k + n * k + m * n * jnp.dtype(out_dtype).itemsize,
    )


def same_rows(few: int, many: int, n: int, k: int) -> Case:
    """What the first `few` of `many` rows differ by from themselves alone: not a bit."""

    def run(x, w, backend):
        alone, among = (
            blockwise_matmul(
                jax.tree.map(lambda a, m=m: a[:m], x),
                w,
                jnp.float32,
                batch_invariant=True,
                backend=backend,
            )
            for m in (few, many)
        )
        return bits_apart(alone, among[:few])

    return Case(
        name=f"rows-{few}-of-{many}",
        arguments=partial(arguments, m=many, n=n, k=k, spread=64.0),
        run=run,
        expected=lambda x, w: np.zeros((few, n)),
        instruction="QGMMA",
    )


def together(m: int, widths: tuple[int, ...], k: int, out_dtype=jnp.bfloat16) -> Case:
    """One input by several weights, and what each product differs by from itself alone."""

    def drawn(key):
        pairs = [arguments(jax.random.fold_in(key, n), m, n, k) for n in widths]
        return pairs[0][0], [w for _, w in pairs]

    def run(x, weights, backend):
        out = blockwise_matmuls(x, weights, out_dtype, backend=backend)
        alone = [blockwise_matmul(x, w, out_dtype, backend=backend) for w in weights]
        return out, [bits_apart(*pair) for pair in zip(out, alone, strict=True)]

    def expected_of_all(x, weights):
        return [expected(x, w) for w in weights], [np.zeros((m, n)) for n in widths]

    return Case(
        name=f"together-{m}-{jnp.dtype(out_dtype).name}",
        arguments=drawn,
        run=run,
        expected=expected_of_all,
        tolerance=2.0**-8 if out_dtype == jnp.bfloat16 else 1e-6,
        instruction="QGMMA",
    )


SMALL = (
    case(136, 256, 576, "several-tiles"),
    case(129, 130, 130, "ragged-everywhere"),
    case(192, 128, 1280, "ring-wraps", jnp.bfloat16, spread=64.0),
    case(256, 512, 2048, "split"),
    case(136, 200, 300, "weight-gradient", w_block=(1, 128)),
    case(130, 136, 260, "gradient-format", x_dtype=E5M2),
    case(1, 136, 1, "one-number"),
    case(1, 256, 2048, "one-row"),
    case(7, 130, 2100, "few-rows", jnp.bfloat16),
    case(40, 300, 576, "forty-rows"),
    case(8, 128, 16384, "long-contraction"),
    case(128, 128, 384, "most-few-rows"),
    case(24, 140, 260, "few-rows-weight-gradient", w_block=(1, 128), x_dtype=E5M2),
    same_rows(136, 264, 130, 600),
    same_rows(20, 31, 130, 2100),
    same_rows(5, 140, 130, 2100),
    same_rows(100, 140, 200, 2100),
    together(5, (1000, 130, 300), 2100),
    together(128, (500, 130), 2100, jnp.float32),
)

_SHAPES = sorted({shape for model in DENSE for shape in model.linears.values()} | {(7168, 16384)})
REAL = (
    *(case(4096, n, k, out_dtype=jnp.bfloat16) for n, k in _SHAPES),
    *(
        case(m, n, k, out_dtype=jnp.bfloat16)
        for m in (1, 16, 64, 128)
        for n, k in ((4096, 4096), (24576, 4096), (4096, 12288))
    ),
    *(
        case(m, n, k, out_dtype=dtype)
        for m, n, k, dtype in ((300, 192, 576, jnp.bfloat16), (5, 576, 1536, jnp.float32))
    ),
    case(576, 200, 300, "weight-gradient-ragged", jnp.float32, w_block=(1, 128)),
    case(4096, 12288, 8192, "weight-gradient-12288x4096", jnp.float32, w_block=(1, 128)),
    case(4096, 4096, 12288, "input-gradient-4096x12288", jnp.bfloat16, x_dtype=E5M2),
)

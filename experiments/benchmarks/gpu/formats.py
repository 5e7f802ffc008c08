"""Part `formats`: products of formats that no kernel of ours multiplies, as XLA computes them on
this GPU (`jax.lax.scaled_dot`, or dequantized), checked and timed against bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.products import BF16, bf16_operands, dot
from experiments.benchmarks.gpu.timing import Work, compare
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.precision import linear, quantize
from fp8rl_jax.precision.linear import LinearPrecision, QuantizedWeight
from pallas_kernels.matmul import blockwise_matmul

STORED, WITH_QUANTIZATION = "as stored", "as stored, x quantized in it"
PAIRS = {
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4_rows", "nvfp4-16x16"),
    "int4 weights": ("compute", "int4-1x128"),
}
SHAPES = ((4096, 4096, 4096), (64, 12288, 4096))
FURTHEST = 1e-2
"""Of a result in bfloat16, or of operands that are on their way to 16 bits, in parts of the
largest: what is wrong is as far as the largest."""


def jobs(setting: Setting) -> list[Job]:
    """Each format at a shape of many rows and at one of few."""
    sources = (
        __name__,
        "fp8rl_jax.precision.linear",
        "fp8rl_jax.precision.formats",
        "pallas_kernels.matmul",
    )
    pairs = {"mxfp8": PAIRS["mxfp8"]} if setting.tiny else PAIRS
    return [
        Job(
            f"{name} {m}x{n}x{k}",
            partial(_product, setting, *pair, m, n, k),
            sources,
            "formats",
            True,
        )
        for m, n, k in (((16, 64, 64),) if setting.tiny else SHAPES)
        for name, pair in pairs.items()
    ]


def _product(setting: Setting, x_name: str, w_name: str, m: int, n: int, k: int) -> dict[str, Any]:
    of_x, of_w = parse_format(x_name), parse_format(w_name)

    def plain(key):
        return bf16_operands(m, n, k, key)

    def stored(key):
        x, w = plain(key)
        return quantize(x, of_x) if of_x.quantized else x, quantize(w, of_w)

    def product(x, w):
        if of_x.quantized:
            return blockwise_matmul(x, w, jnp.bfloat16)
        return linear(x, w, jnp.bfloat16)

    def whole(x, w):
        weight = QuantizedWeight(w, precision=LinearPrecision(of_w, of_x))
        return linear(x, weight, jnp.bfloat16)

    works = {STORED: Work(product, stored), BF16: Work(partial(dot, jnp.bfloat16), plain)}
    if of_x.quantized:
        works[WITH_QUANTIZATION] = Work(whole, lambda key: (plain(key)[0], stored(key)[1]))
    operands = jax.tree.leaves(jax.eval_shape(stored, _KEY))
    moved = sum(x.size * x.dtype.itemsize for x in operands) + 2.0 * m * n
    result = compare(setting, works, tuple(set(works) - {BF16}), 2.0 * m * n * k, moved)
    if setting.compile_only:
        return result
    return result | _checked(stored, product) | {"shape": [m, n, k]}


_KEY = jax.eval_shape(lambda: jax.random.key(0))


def _checked(stored, product) -> dict[str, Any]:
    """The product against that of what the operands stand for, in float32."""

    @jax.jit
    def off(key):
        x, w = stored(key)
        wide = [
            z.dequantize() if hasattr(z, "dequantize") else z.astype(jnp.float32) for z in (x, w)
        ]
        want = jnp.matmul(wide[0], wide[1].T, precision="highest")
        return jnp.abs(product(x, w).astype(jnp.float32) - want).max() / jnp.abs(want).max()

    difference = float(off(jax.random.key(1)))
    return {"difference": difference, "passed": difference <= FURTHEST}

"""What the quantizers are checked and timed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check.cases import Case
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantize.api import (
    quantize_blocks,
    quantize_both,
    quantize_rms_norm,
    quantize_swiglu,
    regroup,
)

E4M3, E5M2, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
SQUARE = (128, 128)
# e4m3's largest; where a last float32 bit of exp or of a mean differs, a value may be the
# neighbouring one
STEP = 32 / 448


def arguments(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, faults: bool = False
) -> tuple:
    """Normal data, its rows and columns of sizes up to e^4 apart; with `faults`, zeros, outliers,
    infinities and NaN in it."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], shape) * jnp.exp(jax.random.normal(keys[1], shape[-1:]))
    x = x * jnp.exp(jax.random.normal(keys[2], (*shape[:-1], 1)))
    if faults:
        x = (
            x.at[..., :3, :]
            .set(0.0)
            .at[..., :, 2]
            .set(0.0)
            .at[..., 5, 7]
            .set(3e38)
            .at[..., 9, 11]
            .set(1e-37)
        )
        x = (
            x.at[..., 6, 140]
            .set(jnp.inf)
            .at[..., 140, 8]
            .set(-jnp.inf)
            .at[..., 7, 141]
            .set(jnp.nan)
        )
    return (x.astype(dtype),)


def quantized(key: jax.Array, shape: tuple[int, int]) -> tuple[QTensor]:
    return (quantize_blocks(*arguments(key, shape, F32), backend="reference"),)


def expected(
    x: np.ndarray, block: tuple[int, int], dtype: jnp.dtype, rule: str
) -> tuple[np.ndarray, np.ndarray]:
    """The definition in numpy: scale = amax * (1 / max), values = cast(clamp(x * (1 / scale))), in
    float32."""
    x, limit = x.astype(np.float32), np.float32(jnp.finfo(dtype).max)
    (m, n), (rows, columns) = x.shape[-2:], block
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -m % rows), (0, -n % columns)])
    blocks = padded.reshape(*x.shape[:-2], -(-m // rows), rows, -(-n // columns), columns)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=(-3, -1))
        scales = np.maximum(amax * (1 / limit), np.float32(2.0**-126))
        if rule == "power_of_two":
            mantissa, exponent = np.frexp(scales)
            powers = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
            scales = np.where(np.isfinite(scales), powers, scales)
        scales = np.where(amax == 0, np.float32(1), scales).astype(np.float32)
        scaled = (
            x
            * np.repeat(np.repeat(np.float32(1) / scales, rows, -2)[..., :m, :], columns, -1)[
                ..., :n
            ]
        )
        return np.clip(scaled, -limit, limit).astype(dtype), scales


def case(
    name: str,
    shape: tuple[int, ...],
    block=(1, 128),
    dtype=E4M3,
    rule="float32",
    x_dtype=BF16,
    faults=False,
) -> Case:
    return _case(
        name,
        partial(arguments, shape=shape, dtype=x_dtype, faults=faults),
        lambda x, backend: quantize_blocks(x, block, dtype, rule, backend=backend),
        lambda x: expected(x, block, dtype, rule),
        math.prod(shape) * (jnp.dtype(x_dtype).itemsize + 1.0),
    )


def both(
    name: str, shape: tuple[int, ...], dtype=E4M3, rule="float32", x_dtype=BF16, faults=False
) -> Case:
    return _case(
        name,
        partial(arguments, shape=shape, dtype=x_dtype, faults=faults),
        lambda x, backend: quantize_both(x, 128, dtype, rule, backend=backend),
        lambda x: tuple(expected(x, block, dtype, rule) for block in ((1, 128), (128, 1))),
        math.prod(shape) * (jnp.dtype(x_dtype).itemsize + 2.0),
    )


def along_tokens(name: str, shape: tuple[int, int], dtype=E4M3, rule="float32") -> Case:
    return _case(
        name,
        partial(quantized, shape=shape),
        lambda q, backend: regroup(q, dtype, rule, backend=backend),
        lambda q: expected(np.asarray(q.dequantize()), (128, 1), dtype, rule),
        math.prod(shape) * 2.0,
    )


def swiglu(
    name: str,
    shape: tuple[int, ...],
    dtype=E4M3,
    rule="float32",
    x_dtype=BF16,
    scales_alone: bool = False,
) -> Case:
    """With `scales_alone` as near as float32: a rounding too many moves a value by no more than
    STEP."""

    def make(key):
        return tuple(arguments(key, shape, x_dtype)[0] for key in jax.random.split(key))

    def definition(gate, up):
        kind = gate.dtype

        def rounded(x):
            return x.astype(kind).astype(np.float32)

        gate, up = gate.astype(np.float32), up.astype(np.float32)
        with np.errstate(over="ignore"):
            active = rounded(gate / (1 + np.exp(-gate.astype(np.float64))))
        values, scales = expected(rounded(active * up), (1, 128), dtype, rule)
        return scales if scales_alone else (values, scales)

    def run(gate, up, backend):
        q = quantize_swiglu(gate, up, 128, dtype, rule, backend=backend)
        return q.scales if scales_alone else q

    return _case(
        name,
        make,
        run,
        definition,
        math.prod(shape) * (2 * jnp.dtype(x_dtype).itemsize + 1.0),
        1e-6 if scales_alone else STEP,
    )


def rms_norm(
    name: str, shape: tuple[int, ...], dtype=E4M3, rule="float32", x_dtype=BF16, offset: float = 0.0
) -> Case:
    def make(key):
        keys = jax.random.split(key)
        return *arguments(keys[0], shape, x_dtype), jax.random.normal(keys[1], shape[-1:]).astype(
            BF16
        )

    def definition(x, weight):
        x64 = x.astype(np.float64)
        normed = (
            x64
            / np.sqrt((x64 * x64).mean(-1, keepdims=True) + 1e-6)
            * (weight.astype(np.float64) + offset)
        )
        return expected(normed.astype(np.float32).astype(x.dtype), (1, 128), dtype, rule)

    return _case(
        name,
        make,
        lambda x, weight, backend: quantize_rms_norm(
            x, weight, 1e-6, offset, 128, dtype, rule, backend=backend
        ),
        definition,
        math.prod(shape) * (jnp.dtype(x_dtype).itemsize + 1.0),
        STEP,
    )


def _case(
    name: str, arguments: Callable, run: Callable, expected: Callable, size: float, tolerance=0.0
) -> Case:
    return Case(
        name=name,
        arguments=arguments,
        run=run,
        expected=expected,
        bytes=float(size),
        tolerance=tolerance,
    )


SMALL = (
    case("rows", (200, 384)),
    case("rows-ragged", (130, 300), x_dtype=F32),
    case("rows-of-a-batch", (3, 5, 140), dtype=E5M2, rule="power_of_two"),
    case("one-number", (1, 1)),
    case("ring-wraps", (256, 1280)),
    case("rows-with-faults", (150, 260), x_dtype=F32, faults=True),
    case("tokens", (256, 200), (128, 1)),
    case("tokens-ragged", (130, 72), (128, 1), E5M2, x_dtype=F32),
    case("tokens-of-experts", (2, 100, 130), (128, 1), rule="power_of_two"),
    case("tokens-with-faults", (150, 260), (128, 1), x_dtype=F32, faults=True),
    case("weight", (256, 384), SQUARE),
    case("weights-of-layers", (3, 150, 260), SQUARE, rule="power_of_two"),
    case("weight-with-faults", (300, 400), SQUARE, x_dtype=F32, faults=True),
    both("both", (256, 384)),
    both("both-ragged", (2, 130, 150), E5M2, x_dtype=F32),
    both("both-with-faults", (200, 300), rule="power_of_two", faults=True),
    along_tokens("regrouped", (300, 200)),
    along_tokens("regrouped-gradient-format", (128, 384), E5M2, "power_of_two"),
    swiglu("swiglu", (200, 384)),
    swiglu("swiglu-ragged", (2, 3, 140), rule="power_of_two", x_dtype=F32),
    swiglu("swiglu-scales", (8, 256), scales_alone=True),
    rms_norm("rms-norm", (200, 384)),
    rms_norm("rms-norm-ragged", (2, 5, 300), x_dtype=F32, offset=1.0),
)

REAL = (
    *(case(f"rows-{m}x{n}", (m, n)) for m in (1, 64, 4096) for n in (4096, 12288)),
    *(case(f"rows-{m}x{n}", (m, n)) for m, n in ((8192, 14336), (8192, 25600), (8192, 768))),
    case("rows-float32", (4096, 4096), x_dtype=F32),
    case("rows-576", (300, 576)),
    case("gradient-rows", (4096, 12288), dtype=E5M2, rule="power_of_two"),
    case("tokens-4096x4096", (4096, 4096), (128, 1)),
    case("tokens-float32", (4096, 4096), (128, 1), x_dtype=F32),
    case("weights-36x12288x4096", (36, 12288, 4096), SQUARE),
    case("weights-128x768x2048", (128, 768, 2048), SQUARE),
    case("weights-float32", (25600, 5120), SQUARE, x_dtype=F32),
    *(both(f"both-4096x{n}", (4096, n)) for n in (4096, 12288)),
    both("both-float32", (4096, 4096), x_dtype=F32),
    both("both-ragged-real", (1000, 576)),
    *(along_tokens(f"regrouped-4096x{n}", (4096, n)) for n in (4096, 12288)),
    *(swiglu(f"swiglu-{m}x{n}", (m, n)) for m, n in ((64, 12288), (4096, 12288), (8192, 768))),
    *(rms_norm(f"rms-norm-{m}x{n}", (m, n)) for m, n in ((64, 4096), (4096, 4096), (4096, 5120))),
)

"""Sums as Hopper's tensor cores make them, bit for bit as published models have it: `python -m
pallas_kernels.check.tensor_cores`.

A float32 accumulator is not filled by float32 additions there. One instruction takes 32 products of
FP8 numbers, or 16 of 16-bit ones, and the accumulator; shifts them all to the largest exponent
among them, cuts off what is more than so many bits below it, adds what is left exactly, and cuts
the sum (F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv 2512.07004,
section 4). With FP8 13 fraction bits are left each time, with 16 bits 25 and then float32's 23.
Everything is cut towards zero, so that a sum of one sign only loses.

`replace_products` lets the interpreter of kernels add so, in place of float64: then a rehearsal of
pallas_kernels.check.device has the errors that a card would have. The command prints how large
they are, for data of several kinds (`errors`), with 128 products added by tensor cores and the rest
in float32, as the kernels do it, and with all of them added by tensor cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

BLOCK = 128
"""Products that a kernel lets tensor cores add, before it goes on in float32."""


@dataclass(frozen=True)
class Unit:
    """How an instruction adds."""

    products: int
    """That it adds at a time, with the accumulator."""
    aligned_bits: int
    """Fraction bits below the largest exponent that an addend keeps."""
    result_bits: int
    """Fraction bits that the sum keeps, below its own exponent."""


FP8, HALF = Unit(32, 13, 13), Unit(16, 25, 23)
_UNITS = {
    np.dtype(jnp.float8_e4m3fn): (FP8, -6),
    np.dtype(jnp.float8_e5m2): (FP8, -14),
    np.dtype(jnp.bfloat16): (HALF, -126),
    np.dtype(np.float16): (HALF, -14),
}
"""By dtype of the operands, with the exponent of their smallest normal number."""
_LEAST = -132
"""Exponent that addends are not shifted below."""
_NONE = -(10**6)
"""Exponent of zero: never the largest."""


def accumulate(accumulator: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compute accumulator + left @ right as Hopper's tensor cores do.

    Args:
        accumulator: float32 [m, n].
        left: [m, k], e4m3, e5m2, bfloat16 or float16.
        right: [k, n], of the same width.

    Returns:
        float32 [m, n]. Where an operand is infinite or NaN, what float64 gives.

    Raises:
        KeyError: operands of another dtype.
    """
    (unit, least), (_, least_right) = _UNITS[left.dtype], _UNITS[right.dtype]
    a, b = left.astype(np.float64), right.astype(np.float64).T
    with np.errstate(invalid="ignore", over="ignore"):
        plain = accumulator.astype(np.float64) + a @ b.T
    total = np.where(np.isfinite(accumulator), accumulator, 0).astype(np.float64)
    a, b = (np.where(np.isfinite(x), x, 0.0) for x in (a, b))
    exponents = _exponent(a, least), _exponent(b, least_right)
    for at in range(0, a.shape[1], unit.products):
        part = slice(at, at + unit.products)
        addends = a[:, None, part] * b[None, :, part]
        largest = (exponents[0][:, None, part] + exponents[1][None, :, part]).max(-1)
        largest = np.maximum(np.maximum(largest, _exponent(total)), _LEAST)
        step = np.ldexp(1.0, largest - unit.aligned_bits)
        total = (np.trunc(addends / step[..., None]).sum(-1) + np.trunc(total / step)) * step
        last = np.ldexp(1.0, np.maximum(_exponent(total), -126) - unit.result_bits)
        # a sum of zero is +0
        total = np.trunc(total / last) * last + 0.0
    return np.where(np.isfinite(plain), total, plain).astype(np.float32)


def _exponent(x: np.ndarray, least: int = _NONE) -> np.ndarray:
    """Whole part of log2 |x|, at least `least`; of zero `_NONE`."""
    return np.where(x != 0, np.maximum(np.frexp(x)[1] - 1, least), _NONE)


class _Product:
    """What the interpreter's wgmma gets from `np.matmul`, and adds to its accumulator."""

    __array_ufunc__ = None

    def __init__(self, left: np.ndarray, right: np.ndarray):
        self._left, self._right = left, right

    def __radd__(self, accumulator: np.ndarray) -> np.ndarray:
        return accumulate(accumulator, self._left, self._right)


def replace_products(other: Callable[..., Any]) -> None:
    """Let the interpreter's wgmma add as tensor cores do, in this process.

    Args:
        other: multiplies operands that are neither FP8 nor of 16 bits.
    """

    def matmul(left: np.ndarray, right: np.ndarray, dtype: np.dtype) -> Any:
        known = left.dtype in _UNITS and right.dtype in _UNITS
        return _Product(left, right) if known else other(left, right, dtype)

    np.matmul = matmul  # ty: ignore[invalid-assignment]


DATA: dict[str, Callable[[np.random.RandomState, tuple[int, int]], np.ndarray]] = {
    "normal": lambda draws, shape: draws.standard_normal(shape),
    "one sign": lambda draws, shape: np.abs(draws.standard_normal(shape)),
    "lognormal": lambda draws, shape: np.exp(2 * draws.standard_normal(shape)),
}
"""Kinds of operands; both are of the same."""


def errors(k: int, rows: int = 64) -> list[dict[str, Any]]:
    """Measure how far sums of k products are from the right ones.

    Args:
        k: a multiple of `BLOCK`.
        rows: of both operands.

    Returns:
        For each of `DATA`, e4m3 scaled by the row's largest and bfloat16, and for blocks and all of
        k added by tensor cores: "largest" and "mean" error, parts of the sum of magnitudes.
    """
    found = []
    for name, draw in DATA.items():
        drawn = [draw(np.random.RandomState(i), (rows, k)) for i in (0, 1)]
        for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
            a, b = (
                (x * 448 / np.abs(x).max(1, keepdims=True)).astype(dtype)
                if dtype == jnp.float8_e4m3fn
                else x.astype(dtype)
                for x in drawn
            )
            right = a.astype(np.float64) @ b.astype(np.float64).T
            magnitudes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
            for block in dict.fromkeys((BLOCK, k)):
                total = np.zeros((rows, rows), np.float32)
                for at in range(0, k, block):
                    part = slice(at, at + block)
                    total += accumulate(np.zeros_like(total), a[:, part], b[:, part].T)
                apart = (total - right) / magnitudes
                found.append(
                    {
                        "data": name,
                        "operands": np.dtype(dtype).name,
                        "k": k,
                        "added by tensor cores": block,
                        "largest": float(np.abs(apart).max()),
                        "mean": float(apart.mean()),
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check.tensor_cores", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--output", help="file for the rows, as JSON")
    output = parser.parse_args().output
    rows = [row for k in (BLOCK, 32 * BLOCK) for row in errors(k)]
    print(*map(json.dumps, rows), sep="\n")
    if output:
        with open(output, "w") as file:
            json.dump({"rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()

"""A case: arguments of an operation, and what it must return for them. One list an operation drives
tests and benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OPERATIONS = (
    "attention",
    "cache_write",
    "decode_attention",
    "grouped_matmul",
    "invariant",
    "matmul",
    "quantize",
)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        name: unique in its operation.
        arguments: key -> arrays and QTensors, traceable, so that their shapes are known without
            making them.
        run: (*arguments, backend=) -> array, QTensor, or a tuple of them.
        expected: (*arguments of numpy arrays) -> the same arrays in float64, from an independent
            formula. None: the reference backend says.
        tolerance: largest difference from `expected`, as a part of its largest magnitude. 0: equal
            bit for bit.
        instruction: of the machine code that it must become, such as "QGMMA"; empty for any.
        flops, bytes: of the work itself: operations, and bytes that must move at least.
    """

    name: str
    arguments: Callable[[jax.Array], tuple]
    run: Callable[..., Any]
    expected: Callable[..., Any] | None = None
    tolerance: float = 0.0
    instruction: str = ""
    flops: float = 0.0
    bytes: float = 0.0


def cases_of(operation: str, sizes: str) -> tuple[Case, ...]:
    """List the cases of an operation.

    Args:
        operation: one of OPERATIONS.
        sizes: "small", with expected values; "real", at the shapes of models; or "all".
    """
    module = import_module(f"pallas_kernels.{operation}.cases")
    return {"small": module.SMALL, "real": module.REAL, "all": (*module.SMALL, *module.REAL)}[sizes]


def parse_cases(
    parser: argparse.ArgumentParser, sizes: str
) -> tuple[argparse.Namespace, list[Case]]:
    """Parse a check's command line into its arguments and the cases that they choose.

    It ends where a name is in no list.
    """
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("cases", nargs="*", help="names; all without one")
    arguments = parser.parse_args()
    known = {case.name: case for case in cases_of(arguments.operation, sizes)}
    if unknown := [name for name in arguments.cases if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; {arguments.operation} has {', '.join(known)}")
    return arguments, [known[name] for name in arguments.cases or known]


def difference(got: Any, expected: Any) -> float:
    """Measure the largest difference of any output, as a part of the expected one's magnitude.

    Infinite where one is not finite.
    """
    worst = 0.0
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)
        if have.shape != want.shape:
            raise ValueError(f"shape {have.shape}, expected {want.shape}")
        same = (have == want) | (np.isnan(have) & np.isnan(want))
        if not same.all():
            apart = np.abs(have - want)[~same]
            finite = np.abs(want)[np.isfinite(want)]
            scale = finite.max() if finite.size and finite.max() > 0 else 1.0
            worst = max(worst, float(apart.max() / scale) if np.isfinite(apart).all() else np.inf)
    return worst


def bits_apart(one: jax.Array, other: jax.Array) -> jax.Array:
    """Mark with 1 where two arrays differ in a bit, for a case whose expected values are 0."""
    one, other = (
        jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        for x in (one, other)
    )
    return (one != other).astype(jnp.float32)


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; `intermediate` is an expert's where there are `experts`, each token taking
    `chosen` of them."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    chosen: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each kind of linear layer, an expert's included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.hidden),
            "kv": (kv, self.hidden),
            "o": (self.hidden, q),
            "gate": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


QWEN3_8B = Shape("qwen3-8b", 4096, 12288, 32, 8, 128)
LLAMA31_8B = Shape("llama-3.1-8b", 4096, 14336, 32, 8, 128)
QWEN3_32B = Shape("qwen3-32b", 5120, 25600, 64, 8, 128)
QWEN3_30B_A3B = Shape("qwen3-30b-a3b", 2048, 768, 32, 4, 128, experts=128, chosen=8)
DENSE = (QWEN3_8B, LLAMA31_8B, QWEN3_32B)

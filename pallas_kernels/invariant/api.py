"""Batch-invariant operations: a row has the same bits in every batch.

What a program does around a float32 operation changes its last bits: a product that feeds a sum
becomes one instruction with one rounding, a transposed operand is multiplied by another plan, a sum
is split. So an operation by elements stands between two barriers, which XLA moves nothing across
(`isolated`), and each element then has the same instructions in every batch. Sums and products have
an order of their own, which the number of rows does not change: on a CPU that of the terms
(`cpu`) or that of XLA's products of one form (`reference`), on Hopper that of kernels (`hopper`).

That is right by test (tests/kernels/test_invariant.py, experiments.invariant), and not by argument
as `pallas_kernels.exact` is: for one device, which is what it was tested on (`is_available`). On a
CPU it costs time in products of few rows alone (docs/results.md). Batch-invariant kernels: He et
al., "Defeating nondeterminism in LLM inference", Thinking Machines, 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, BackendError, platform, resolve
from pallas_kernels.exact import materialize, with_gradient_of
from pallas_kernels.grouped_matmul import dot as plain_grouped_dot
from pallas_kernels.invariant import cpu, reference
from pallas_kernels.matmul import Panels
from pallas_kernels.matmul import dot as plain_dot

OPERATION = "invariant"


def is_available(backend: Backend = "auto") -> bool:
    """Whether a row's bits are promised: on one CPU device or one Hopper GPU."""
    chosen = resolve(backend, OPERATION)
    fits = chosen == "hopper" or platform() == "cpu"
    return fits and jax.device_count() == 1


def check_available(backend: Backend = "auto") -> None:
    """Refuse a backend that has neither batch-invariant nor order-free operations here.

    Raises:
        BackendError: hopper, on more than one device.
    """
    if resolve(backend, OPERATION) == "hopper" and not is_available(backend):
        raise BackendError(
            "exact operations of the hopper backend run on one GPU alone, JAX sees "
            f"{jax.device_count()}; choose reference"
        )


def isolated(function: Callable) -> Callable:
    """Compute a function of arrays alone by itself, with its own derivatives."""
    return with_gradient_of(function, lambda *arrays: materialize(function(*materialize(arrays))))


def dot(
    x: Float[Array, "*batch k"],
    w: Float[Array, "n k"] | Panels,
    out_dtype: jnp.dtype = jnp.float32,
    *,
    backend: Backend = "auto",
) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T, each row of it a function of that row of x and of w alone.

    Sums are float32, and so are the products' operands: on Hopper two of one 16-bit dtype are
    multiplied as they are, others as up to three bfloat16 parts each, six products in place of one.

    Args:
        x, w: any float dtype up to float32. `Panels` have the same bits and no gradient.
        out_dtype: of the result.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """

    def plain(x, w):
        return plain_dot(x.astype(w.dtype), w).astype(out_dtype)

    exactly = partial(_backend(backend).dot, out_dtype=out_dtype)
    return exactly(x, w) if isinstance(w, Panels) else with_gradient_of(plain, exactly)(x, w)


def grouped_dot(
    x: Float[Array, "m k"],
    w: Float[Array, "groups n k"],
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype = jnp.float32,
    *,
    backend: Backend = "auto",
) -> Float[Array, "m n"]:
    """Multiply each row of x, sorted by group, with its group's part of w transposed, as `dot`.

    Returns:
        [m, n] in `out_dtype`; zero behind the last group.

    Raises:
        BackendError: as `dot`.
    """

    def plain(x, w, sizes):
        return plain_grouped_dot(x.astype(w.dtype), w, sizes).astype(out_dtype)

    exactly = partial(_backend(backend).grouped_dot, out_dtype=out_dtype)
    return with_gradient_of(plain, exactly)(x, w, group_sizes)


def row_sum(x: Float[Array, "*batch n"], *, backend: Backend = "auto") -> Float[Array, "*batch 1"]:
    """Add float32 terms over the last axis.

    Raises:
        BackendError: as `dot`.
    """
    return with_gradient_of(lambda x: x.sum(-1, keepdims=True), _backend(backend).row_sum)(x)


def _backend(backend: Backend):
    chosen = resolve(backend, OPERATION)
    if chosen != "hopper":
        return cpu if chosen == "cpu" else reference
    # importing Pallas takes longer than importing JAX
    from pallas_kernels.invariant import hopper

    return hopper

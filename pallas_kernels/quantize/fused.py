"""Quantizers that compute what they quantize: SwiGLU of two products, RMS norm of a residual
stream."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backend import Backend
from pallas_kernels.partition import partitioned
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.api import BLOCKS, E4M3, Rule, axes, check, chosen_backend


def quantize_swiglu(
    gate: Float[Array, "*batch n"],
    up: Float[Array, "*batch n"],
    size: int = 128,
    dtype: jnp.dtype = E4M3,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch nb"]]:
    """`quantize_blocks` of silu(gate) * up (arXiv 2002.05202) in blocks of (1, size), which is
    never in memory itself.

    silu(gate) and the product are each rounded to the dtype of `gate`, as torch and vLLM round
    them. Another backend's exponential may differ in its last float32 bit, and a number then by one
    step of that dtype before it is quantized.

    Args:
        gate, up: one shape and dtype; bfloat16 or float32 on hopper.
        size, dtype, scale, backend: as in `quantize_both`.

    Returns:
        values, scales: as `quantize_blocks`.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: `gate` and `up` differ in shape or dtype, or have no elements.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"quantize_swiglu: gate is {gate.dtype}{gate.shape}, up {up.dtype}{up.shape}; they "
            "must be alike"
        )
    check("quantize_swiglu", gate, (1, size))
    if chosen_backend("quantize_swiglu", backend, (1, size), dtype, gate.dtype) == "reference":
        return reference.quantize(reference.swiglu(gate, up), (1, size), dtype, scale)
    from pallas_kernels.quantize import hopper

    lead = axes(gate.ndim + 1)
    kernel = partial(hopper.quantize_swiglu, dtype=dtype, rule=scale)
    return partitioned(kernel, f"{lead} n, {lead} n -> {lead} n, {lead} b", BLOCKS)(gate, up)


def quantize_rms_norm(
    x: Float[Array, "*batch n"],
    weight: Float[Array, " n"],
    eps: float,
    offset: float = 0.0,
    size: int = 128,
    dtype: jnp.dtype = E4M3,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch nb"]]:
    """`quantize_blocks` of x / sqrt(mean(x^2) + eps) * (offset + weight) (arXiv 1910.07467) in
    blocks of (1, size).

    The norm is computed in float32 and rounded to the dtype of `x`. Both backends take mean(x^2)
    from the same reduction of XLA.

    Args:
        x: bfloat16 or float32 on hopper.
        weight, eps, offset: of the norm; `offset` is 1 where a checkpoint stores the gain less one.
        size, dtype, scale, backend: as in `quantize_both`.

    Returns:
        values, scales: as `quantize_blocks`.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: `weight` is not one number for each column of `x`, or `x` has no elements.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"quantize_rms_norm: weight {weight.shape} is not that of rows of x {x.shape}"
        )
    check("quantize_rms_norm", x, (1, size))
    inverse, gain = reference.inverse_rms(x, eps), reference.gain(weight, offset)
    if chosen_backend("quantize_rms_norm", backend, (1, size), dtype, x.dtype) == "reference":
        return reference.quantize(reference.rms_norm(x, inverse, gain), (1, size), dtype, scale)
    from pallas_kernels.quantize import hopper

    lead = axes(x.ndim + 1)
    kernel = partial(hopper.quantize_rms_norm, dtype=dtype, rule=scale)
    return partitioned(kernel, f"{lead} n, {lead} one, n -> {lead} n, {lead} b", BLOCKS, ("one",))(
        x, inverse, gain
    )

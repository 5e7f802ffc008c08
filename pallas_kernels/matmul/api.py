"""Blockwise-scaled FP8 matrix product: activations in 1 x k groups, weights in n x k blocks."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, block_name, check_pair, choose, resolve, uses_cpu
from pallas_kernels.matmul import cpu, reference
from pallas_kernels.matmul.cpu import Panels
from pallas_kernels.partition import on_mesh, partitioned
from pallas_kernels.rounding import rounded

HOPPER_BLOCKS = ((128, 128), (1, 128))


def selected_backend(backend: Backend) -> str:
    """Choose the backend that `blockwise_matmul` runs for this argument.

    Raises:
        BackendError: it cannot.
    """
    return resolve(backend, "blockwise_matmul")


def packs(backend: Backend) -> bool:
    """Whether a loop multiplies weights in `Panels`, the form of the CPU kernel.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """
    return uses_cpu(backend, "dot")


def dot(x: Float[Array, "*batch k"], w: Float[Array, "n k"] | Panels) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T, accumulated in float32: by XLA, or by the CPU kernel with `Panels`, which
    have no gradient."""
    return cpu.dot(x, w) if isinstance(w, Panels) else reference.dot(x, w)


def blockwise_matmul(
    x: Float[Array, "*batch k"],
    x_scales: Float[Array, "*batch kb"],
    w: Float[Array, "n k"],
    w_scales: Float[Array, "nb kb"],
    w_block: tuple[int, int] = (128, 128),
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    backend: Backend = "auto",
) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T of quantized operands, scaled block by block and accumulated in float32.

    y[..., n] = sum over 128-blocks b of x_scales[..., b] * w_scales[n // 128, b] * (x_b . w_b).

    The weight is [out, in], both operands are contiguous along the contraction (what Hopper's FP8
    tensor cores need), and any m, n, k is served. Layout and promotion every 128 of k: DeepSeek-V3
    (arXiv 2412.19437, section 3.3.2).

    Args:
        x, x_scales: activations and the scales of their 1 x w_block[1] groups, as `quantize_blocks`
            returns them.
        w, w_scales, w_block: weight, scales and block of the weight.
        out_dtype: bfloat16 or float32.
        backend: implementation; hopper has kernels for `w_block` (128, 128) and (1, 128), "auto" is
            the reference for others.

    Raises:
        BackendError: a backend asked for by name cannot serve the call, or none multiplies these
            two formats.
        ValueError: scale shapes do not belong to the operands, or an axis has length 0.
    """
    served = w_block in HOPPER_BLOCKS
    chosen = choose(
        "blockwise_matmul",
        backend,
        "" if served else f"product of weights in blocks of {block_name(w_block)}",
    )
    n, k = w.shape
    blocks = (-(-n // w_block[0]), -(-k // w_block[1]))
    if w_scales.shape != blocks or x_scales.shape != (*x.shape[:-1], blocks[1]):
        raise ValueError(
            f"blockwise_matmul: x {x.shape} with scales {x_scales.shape} and w {w.shape} with "
            f"scales {w_scales.shape} "
            f"do not fit block {w_block}: w_scales must be {blocks}, x_scales "
            f"{(*x.shape[:-1], blocks[1])}"
        )
    if 0 in (*x.shape, n):
        raise ValueError(f"blockwise_matmul: nothing to multiply in x {x.shape} and w {w.shape}")
    check_pair("blockwise_matmul", chosen, x.dtype, w.dtype)
    if chosen == "reference":
        return reference.matmul(x, x_scales, w, w_scales, w_block, out_dtype)
    from pallas_kernels.matmul import hopper  # importing Pallas takes longer than importing JAX

    # what is added over devices is added in float32
    kernel = partial(
        hopper.matmul, w_block=w_block, out_dtype=jnp.float32 if on_mesh() else out_dtype
    )
    lead = " ".join(f"m{axis}" for axis in range(x.ndim - 1))
    blocks = {"b": ("k", 128)} | ({"c": ("n", w_block[0])} if w_block[0] > 1 else {})
    rule = f"{lead} k, {lead} b, n k, {'c' if w_block[0] > 1 else 'n'} b -> {lead} n"
    return rounded(partitioned(kernel, rule, blocks)(x, x_scales, w, w_scales), out_dtype)

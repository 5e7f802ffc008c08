"""Blockwise-scaled FP8 matrix product: activations in 1 x k groups, weights in n x k blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backend import (
    Backend,
    block_name,
    check_pair,
    choose,
    platform,
    resolve,
    uses_cpu,
)
from pallas_kernels.matmul import cpu, reference
from pallas_kernels.matmul.cpu import Panels
from pallas_kernels.partition import on_mesh, partitioned
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantize import Blocks, dequantize
from pallas_kernels.rounding import rounded

HOPPER_BLOCKS = ((128, 128), (1, 128))


def selected_backend(backend: Backend) -> str:
    """Choose the backend that `blockwise_matmul` runs for this argument.

    Raises:
        BackendError: it cannot.
    """
    return resolve(backend, "blockwise_matmul")


def keeps_quantized(w: QTensor, backend: Backend) -> bool:
    """Whether a loop multiplies a weight as it is stored, by a kernel or by a GPU's own product of
    scaled operands, and gains nothing from a dequantized copy.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """
    if selected_backend(backend) != "reference":
        return True
    scaled = platform() == "gpu" and reference.has_scaled_products()
    return scaled and w.format.scaled_operand(w) is not None


def packs(backend: Backend) -> bool:
    """Whether a loop multiplies weights in `Panels`, the form of the CPU kernel.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """
    return uses_cpu(backend, "dot")


def dot(
    x: Float[Array, "*batch k"],
    w: Float[Array, "n k"] | Panels,
    dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T, accumulated in float32: by XLA, or by the CPU kernel with `Panels`, which
    have no gradient. `dtype` is that of the computation that it is a part of."""
    return cpu.dot(x, w) if isinstance(w, Panels) else reference.dot(x, w, dtype=dtype)


def blockwise_matmul(
    x: QTensor,
    w: QTensor,
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    over: Literal[-1, -2] = -1,
    batch_invariant: bool = False,
    sum_dtype: jnp.dtype = jnp.float32,
    backend: Backend = "auto",
) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T of quantized operands, scaled block by block and accumulated in float32.

    y[..., n] = sum over 128-blocks b of x_scales[..., b] * w_scales[n // 128, b] * (x_b . w_b).

    The weight is [out, in], both operands are contiguous along the contraction (what Hopper's FP8
    tensor cores need), and any m, n, k is served. Layout and promotion every 128 of k: DeepSeek-V3
    (arXiv 2412.19437, section 3.3.2).

    Args:
        x: activations [*batch, k], each row quantized by itself, in groups along k as long as the
            weight's blocks.
        w: weight [n, k].
        out_dtype: bfloat16 or float32.
        over: axis of w that is summed; -2: w is [k, n], and the product x @ w, as dX = dY W is.
        batch_invariant: on Hopper, many rows add in the parts into which up to 128 rows split the
            contraction to fill the GPU, so that a row has the same bits whatever is multiplied with
            it; that takes a tenth to a quarter longer.
        sum_dtype: what the kernel's parts are rounded to before they are added over devices, where
            a mesh splits the contraction.
        backend: implementation; hopper has kernels for `Blocks` of a weight of (128, 128) and (1,
            128), "auto" is the reference for others.

    Raises:
        BackendError: a backend asked for by name cannot serve the call, or none multiplies these
            two formats.
        ValueError: shapes of operands or scales do not belong together, an axis has length 0, or
            `over` is another axis.
    """
    turned = along(over, "blockwise_matmul", w)
    if _checked(x, turned, backend) == "reference":
        return reference.matmul(x, w, over, out_dtype, partial(dequantize, backend=backend))
    w = turned
    from pallas_kernels.matmul import hopper  # importing Pallas takes longer than importing JAX

    kernel = partial(
        hopper.matmul,
        w_block=w.block,
        out_dtype=sum_dtype if on_mesh() else out_dtype,
        batch_invariant=batch_invariant,
    )
    lead = " ".join(f"m{axis}" for axis in range(len(x.shape) - 1))
    by_block = w.block[0] > 1
    blocks = {"b": ("k", 128)} | ({"c": ("n", w.block[0])} if by_block else {})
    rule = f"{lead} k, {lead} b, n k, {'c' if by_block else 'n'} b -> {lead} n"
    arrays = (x.values, x.scales, w.values, w.scales)
    return rounded(partitioned(kernel, rule, blocks)(*arrays), out_dtype)


def blockwise_outer_product(
    dy: QTensor, x: QTensor, *, backend: Backend = "auto"
) -> Float[Array, "n k"]:
    """Compute dy.T @ x: `blockwise_matmul`'s weight gradient, float32.

    Args:
        dy: gradient of the product, [m, n] in blocks along m, as of (128, 1).
        x: input of the product, [m, k], likewise.
        backend: as `blockwise_matmul` has it.

    Raises:
        BackendError, ValueError: as `blockwise_matmul`.
    """
    if _checked(dy.T, x.T, backend) == "reference":
        wide = partial(dequantize, backend=backend)
        return reference.outer_product(dy, x, wide)
    return blockwise_matmul(dy.T, x.T, jnp.float32, backend=backend)


def blockwise_matmuls(
    x: QTensor,
    weights: Sequence[QTensor],
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    backend: Backend = "auto",
) -> list[Float[Array, "*batch n"]]:
    """Compute `blockwise_matmul` of x with each weight: the same bits, in one kernel where 128 rows
    or fewer meet weights in blocks of (128, 128) on one Hopper GPU.

    A decode step's product with a narrow weight ends before a GPU is filled, so those that share
    their input run together.

    Args:
        x, out_dtype, backend: as `blockwise_matmul` takes them.
        weights: [n, k] each.

    Raises:
        BackendError, ValueError: as `blockwise_matmul`.
    """
    chosen = {_checked(x, w, backend) for w in weights}
    if chosen == {"hopper"} and {w.block for w in weights} == {(128, 128)} and not on_mesh():
        from pallas_kernels.matmul import hopper

        if math.prod(x.shape[:-1]) <= hopper.FEW_ROWS:
            arrays = [array for w in weights for array in (w.values, w.scales)]
            return hopper.matmuls(x.values, x.scales, *arrays, out_dtype=out_dtype)
    return [blockwise_matmul(x, w, out_dtype, backend=backend) for w in weights]


def _checked(x: QTensor, w: QTensor, backend: Backend) -> str:
    """The backend of a product, whose operands fit each other."""
    chosen = choose("blockwise_matmul", backend, unserved(x, w, HOPPER_BLOCKS))
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"blockwise_matmul: cannot sum over {x.shape[-1]} numbers of x {x.shape} and "
            f"{w.shape[-1]} of w {w.shape}"
        )
    if in_blocks(x, w) and x.format.by_row:
        (n, k), block = w.shape, w.block
        blocks = (-(-n // block[0]), -(-k // block[1]))
        if w.scales.shape != blocks or x.scales.shape != (*x.shape[:-1], blocks[1]):
            raise ValueError(
                f"blockwise_matmul: x {x.shape} with scales {x.scales.shape} and w {w.shape} with "
                f"scales {w.scales.shape} "
                f"do not fit block {block}: w_scales must be {blocks}, x_scales "
                f"{(*x.shape[:-1], blocks[1])}"
            )
        check_pair("blockwise_matmul", chosen, x.values.dtype, w.values.dtype)
    if 0 in (*x.shape, *w.shape):
        raise ValueError(f"blockwise_matmul: nothing to multiply in x {x.shape} and w {w.shape}")
    return chosen


def along(over: int, operation: str, w: QTensor) -> QTensor:
    """The weight with the axis last that a product sums over.

    Raises:
        ValueError: it is none of the two.
    """
    if over not in (-1, -2):
        raise ValueError(f"{operation}: over={over!r} is no axis of a product; use -1 or -2")
    return w if over == -1 else w.T


def in_blocks(x: QTensor, w: QTensor) -> bool:
    """Whether both operands are in `Blocks`, which kernels multiply."""
    return isinstance(x.format, Blocks) and isinstance(w.format, Blocks)


def unserved(x: QTensor, w: QTensor, blocks: tuple[tuple[int, int], ...]) -> str:
    """Say which product Hopper's kernels lack, empty where they have it; `blocks` of the weight."""
    if not in_blocks(x, w):
        return f"product of {x.format.name} by {w.format.name}"
    return "" if w.block in blocks else f"product of weights in blocks of {block_name(w.block)}"

"""Blockwise-scaled FP8 products of sorted rows, one weight a group: the experts of a mixture, and
their gradients."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, check_pair, choose
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.matmul import along, in_blocks, unserved
from pallas_kernels.partition import on_mesh, partitioned
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantize import dequantize
from pallas_kernels.rounding import rounded

HOPPER_BLOCK = (128, 128)


def grouped_matmul(
    x: QTensor,
    w: QTensor,
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    over: Literal[-1, -2] = -1,
    backend: Backend = "auto",
) -> Float[Array, "m n"]:
    """Multiply x[i] @ w[g].T of quantized operands, g the group of row i, accumulated in float32.

    The first group_sizes[0] rows are group 0's, the next group_sizes[1] are group 1's, and so on.
    Sizes are known at run time only; a group may be empty. Rows behind the last group are zero.
    Each product is that of `blockwise_matmul` (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    Args:
        x: rows [m, k], each quantized by itself, in groups along k as long as the weight's blocks.
        w: weights [groups, n, k].
        group_sizes: int32, adding up to at most m.
        out_dtype: bfloat16 or float32.
        over: axis of w that is summed; -2: w is [groups, k, n], and each product x @ w.
        backend: implementation; hopper has kernels for blocks of 128, "auto" is the reference for
            others.

    Raises:
        BackendError: a backend asked for by name cannot serve the call, or none multiplies these
            two formats.
        ValueError: shapes do not belong together, an axis has length 0, or `over` is another axis.
    """
    as_stored, w = w, along(over, "grouped_matmul", w)
    chosen = choose("grouped_matmul", backend, unserved(x, w, (HOPPER_BLOCK,)))
    groups = len(w.values)
    n, k = w.shape[1:]
    expected: dict[str, tuple[int, ...]] = {
        "group_sizes": (groups,),
        "x": (len(x.values), k),
    }
    given = {"group_sizes": group_sizes.shape, "x": x.shape}
    if in_blocks(x, w) and x.format.by_row:
        block = w.block
        blocks = (-(-n // block[0]), -(-k // block[1]))
        expected |= {
            "x_scales": (len(x.values), blocks[1]),
            "w_scales": (groups, *blocks),
        }
        given |= {"x_scales": x.scales.shape, "w_scales": w.scales.shape}
        check_pair("grouped_matmul", chosen, x.values.dtype, w.values.dtype)
    if wrong := _wrong(given, expected):
        raise ValueError(f"grouped_matmul: for w {w.shape} in blocks {w.block}, {wrong}")
    if 0 in (*x.shape, *w.shape):
        raise ValueError(f"grouped_matmul: nothing to multiply in x {x.shape} and w {w.shape}")
    if chosen == "reference":
        wide = dequantize(x, backend=backend), dequantize(as_stored, backend=backend)
        return rounded(reference.dot(*wide, group_sizes, over, out_dtype), out_dtype)
    # importing Pallas takes longer than importing JAX
    from pallas_kernels.grouped_matmul import hopper

    # what is added over devices is added in float32
    kernel = partial(hopper.matmul, out_dtype=jnp.float32 if on_mesh() else out_dtype)
    blocks = {"b": ("k", 128), "c": ("n", 128)}
    kernel = partitioned(kernel, "m k, m b, g n k, g c b, g -> m n", blocks, ("m", "g"))
    return rounded(kernel(x.values, x.scales, w.values, w.scales, group_sizes), out_dtype)


def grouped_outer_product(
    dy: QTensor, x: QTensor, group_sizes: Int[Array, " groups"], *, backend: Backend = "auto"
) -> Float[Array, "groups n k"]:
    """Compute dy[rows of g].T @ x[rows of g] for each group: `grouped_matmul`'s weight gradient.

    The contraction is over rows, so both operands have scales of `block` x 1, and every group
    begins at a multiple of `block` (`align_groups` moves the rows there). Rows that alignment left
    between groups must be zero.

    Args:
        dy: gradient of the product, [m, n] in blocks of (block, 1).
        x: input of the product, [m, k], likewise.
        group_sizes: int32, multiples of `block`, adding up to at most m.
        backend: implementation; hopper has kernels for blocks of 128, "auto" is the reference for
            others.

    Raises:
        BackendError: a backend asked for by name cannot serve the call, or none multiplies these
            two formats.
        ValueError: shapes do not belong together.
    """
    chosen = choose("grouped_outer_product", backend, unserved(x, dy, ((HOPPER_BLOCK[0], 1),)))
    if in_blocks(x, dy) and dy.block[1] == 1:
        block, m = dy.block[0], len(dy.values)
        blocks = -(-m // block)
        expected: dict[str, tuple[int, ...]] = {
            "x": (m, x.shape[1]),
            "dy_scales": (blocks, dy.shape[1]),
            "x_scales": (blocks, x.shape[1]),
        }
        given = {"x": x.shape, "dy_scales": dy.scales.shape, "x_scales": x.scales.shape}
        if wrong := _wrong(given, expected):
            raise ValueError(
                f"grouped_outer_product: for dy {dy.shape} in blocks of {block} rows, {wrong}"
            )
        check_pair("grouped_outer_product", chosen, dy.values.dtype, x.values.dtype)
    if chosen == "reference":
        wide = dequantize(dy, backend=backend), dequantize(x, backend=backend)
        return reference.outer_product(*wide, group_sizes)
    from pallas_kernels.grouped_matmul import hopper

    kernel = partitioned(
        hopper.outer_products, "m n, b n, m k, b k, g -> g n k", {}, ("m", "b", "g")
    )
    return kernel(dy.values, dy.scales, x.values, x.scales, group_sizes)


def _wrong(given: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> str:
    """Name the shapes that are not as expected."""
    return ", ".join(
        f"{name} {given[name]} must be {shape}"
        for name, shape in expected.items()
        if given[name] != shape
    )


def align_groups(
    arrays: tuple[Float[Array, "m _"], ...], group_sizes: Int[Array, " groups"], block: int = 128
) -> tuple[tuple[Float[Array, "aligned _"], ...], Int[Array, " groups"]]:
    """Lay sorted rows out so that every group begins at a multiple of `block`, zeros between.

    Args:
        arrays: each with its rows sorted by group; rows behind the last group are dropped.
        group_sizes: int32, adding up to at most m.

    Returns:
        The arrays with m rounded up, plus `block` for each group, rows; and the group sizes rounded
        up to `block`.
    """
    rows = len(arrays[0])
    places, aligned = reference.align(rows, group_sizes, block)
    total = reference.aligned_rows(rows, len(group_sizes), block)
    return tuple(reference.lay_out(x, places, total) for x in arrays), aligned

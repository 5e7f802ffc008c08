"""Batch-invariant products and sums on Hopper: kernels that add in an order of their own.

Products run the loop of the FP8 ones (mainloop), without scales. The tensor cores multiply 16-bit
numbers, so a float32 operand becomes bfloat16 parts, x = x0 + x1 + x2, of which the products x0 w2,
x1 w1, x2 w0, x0 w1, x1 w0, x0 w0 stand behind each other in one contraction, small ones first: what
is left out is below 2^-24 of a term (Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
intelligence datatype for higher-precision computations", 2019).

A sum is one of 128 partial sums, column j of every 128 added in their order, and then of these.
Rows of more than `SEGMENT` terms are added in segments, whose sums are added likewise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import mosaic
from pallas_kernels.exact import materialize
from pallas_kernels.grouped_matmul import hopper as grouped_hopper
from pallas_kernels.matmul import hopper as matmul_hopper
from pallas_kernels.matmul.hopper import pad
from pallas_kernels.rounding import rounded

SEGMENT = 4096
ROWS, COLUMNS = 64, 128  # of a tile
WARPGROUPS, STAGES = 2, 3
_PARTS = 3


def dot(x, w, out_dtype):
    rows, w = operands(x.reshape(-1, x.shape[-1]), w)
    return matmul_hopper.dot(rows, w, out_dtype=out_dtype).reshape(*x.shape[:-1], len(w))


def grouped_dot(x, w, group_sizes, out_dtype):
    x, w = operands(x, w)
    return grouped_hopper.dot(x, w, group_sizes, out_dtype=out_dtype)


def operands(x: Array, w: Array) -> tuple[Array, Array]:
    """x and w in one 16-bit dtype, with a contraction that may be longer."""
    if x.dtype == w.dtype and x.dtype.itemsize == 2:
        return x, w
    left, right = parts(x), parts(w)
    pairs = [
        (i, j)
        for size in reversed(range(_PARTS))
        for i in range(len(left))
        for j in range(len(right))
        if i + j == size
    ]
    return (
        jnp.concatenate([left[i] for i, _ in pairs], axis=-1),
        jnp.concatenate([right[j] for _, j in pairs], axis=-1),
    )


def parts(x: Array) -> list[Array]:
    """bfloat16 arrays, the largest first, whose sum is x."""
    if x.dtype == jnp.bfloat16:
        return [x]
    # whatever made x is not to be fused with what is taken off it
    rest, found = materialize(x.astype(jnp.float32)), []
    for _ in range(_PARTS):
        found.append(rounded(rest, jnp.bfloat16))
        rest = rest - found[-1].astype(jnp.float32)
    return found


def row_sum(x):
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    while rows.shape[1] > 1:
        rows = _sums(rows)
    return rows.reshape(*x.shape[:-1], 1)


@mosaic.outlined()
def _sums(x):
    """The sums of each segment of x [m, n], [m, segments]."""
    m, x = len(x), pad(x, 8, COLUMNS)
    blocks, per_segment = x.shape[1] // COLUMNS, SEGMENT // COLUMNS
    segments = -(-blocks // per_segment)
    tiles = -(-len(x) // ROWS) * segments

    def body(x, out, ring, full, staged):
        wg, every = lax.axis_index("wg"), lax.axis_size(("block", "wg"))
        first = lax.axis_index(("block", "wg"))

        def tile(i, loaded):
            number = first + i * every
            row, segment = lax.div(number, segments), lax.rem(number, segments)
            begin, rows = segment * per_segment, mosaic.ds(row * ROWS, ROWS)
            steps = jnp.minimum(per_segment, blocks - begin)

            def slot_of(step):
                return lax.rem(loaded + step, STAGES)

            def load(step):
                columns = mosaic.ds((begin + step) * COLUMNS, COLUMNS)
                slot = slot_of(step)
                mosaic.copy_gmem_to_smem(
                    x.at[rows, columns], ring.at[wg, slot], full.at[wg * STAGES + slot]
                )

            for step in range(STAGES):
                mosaic.when(step < steps)(lambda step=step: load(step))

            def add(step, total):
                slot = slot_of(step)
                mosaic.barrier_wait(full.at[wg * STAGES + slot])
                terms = mosaic.load(ring.at[wg, slot], layout=mosaic.Layout.WGMMA)
                total = total + terms
                mosaic.commit_smem()  # the next load of the slot is another proxy's write
                mosaic.when(step + STAGES < steps)(lambda: load(step + STAGES))
                return total

            nothing = mosaic.layout_cast(
                jnp.zeros((ROWS, COLUMNS), jnp.float32), mosaic.Layout.WGMMA
            )
            total = lax.fori_loop(0, steps, add, nothing).sum(axis=1)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            staged[wg] = total
            mosaic.commit_smem()
            mosaic.copy_smem_to_gmem(staged.at[wg], out.at[segment, rows])
            return loaded + steps

        own = lax.div(tiles - first + every - 1, every)
        lax.fori_loop(0, own, tile, jnp.int32(0))
        mosaic.wait_smem_to_gmem(0)

    scratch = [
        mosaic.tiled((WARPGROUPS, STAGES, ROWS, COLUMNS), jnp.float32),
        mosaic.Barrier(num_barriers=WARPGROUPS * STAGES),
        mosaic.SMEM((WARPGROUPS, ROWS), jnp.float32),
    ]
    launched = mosaic.launch(
        body,
        jax.ShapeDtypeStruct((segments, len(x) + -len(x) % ROWS), jnp.float32),
        scratch=scratch,
        threads=WARPGROUPS,
        tiles=-(-tiles // WARPGROUPS),
        name="invariant_sum",
    )
    return launched(x)[:, :m].T

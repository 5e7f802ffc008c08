"""All that the kernels use of Pallas Mosaic GPU, whose interface changes from release to release:
no other file imports it.

What the Hopper kernels share stands here too: how a tile lies in shared memory, how a number
becomes FP8, how a kernel starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.core import UnswizzleRef
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import hopper_sms

ACC = plgpu.ACC
SMEM = plgpu.SMEM
Barrier = plgpu.Barrier
ClusterBarrier = plgpu.ClusterBarrier
Layout = plgpu.Layout
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
broadcasted_iota = plgpu.broadcasted_iota
commit_smem = plgpu.commit_smem
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
ds = pl.ds
layout_cast = plgpu.layout_cast
load = plgpu.load
multiple_of = pl.multiple_of
nd_loop = plgpu.nd_loop
planar_snake = plgpu.planar_snake
run_scoped = pl.run_scoped
set_max_registers = plgpu.set_max_registers
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
wgmma = plgpu.wgmma
wgmma_accumulator_load = plgpu.wgmma_accumulator_load
when = pl.when


def _same_bytes_every_time(serialize: Callable) -> Callable:
    """Take out of a kernel's module the name of its dump files, which counts the kernels that this
    process has lowered so far: with it, no compiled program that has a kernel is found again in
    JAX's persistent cache (jax 0.11.2)."""

    @wraps(serialize)
    def nameless(module, *args, **options):
        attributes = module.operation.attributes
        if "mosaic_gpu.dump_basename" in attributes:
            del attributes["mosaic_gpu.dump_basename"]
        return serialize(module, *args, **options)

    return nameless


# ty wants the very type of the function, which the wrapper has not
mosaic_core._run_serde_pass = _same_bytes_every_time(  # ty: ignore[invalid-assignment]
    mosaic_core._run_serde_pass
)


def name_every_kernel() -> None:
    """Give each kernel that is lowered from now on a name of its own again.

    So equal ones are each compiled, and shown.
    """
    mosaic_core._run_serde_pass = getattr(
        mosaic_core._run_serde_pass, "__wrapped__", mosaic_core._run_serde_pass
    )


SMEM_BYTES = 232_448  # what one block of a Hopper GPU may have
SMEM_OF_MULTIPROCESSOR = SMEM_BYTES + 1024  # each block takes 1024 bytes more than it asks for


def outlined(*static: str) -> Callable[[Callable], Callable]:
    """Make a function that runs kernels one function of the program.

    It is lowered once a shape, however many layers call it.

    Args:
        static: names of its arguments that are no arrays; they are given by name.
    """

    def decorate(function: Callable) -> Callable:
        jitted = jax.jit(
            lambda *arrays, sms, **options: function(*arrays, **options),
            static_argnames=("sms", *static),
        )
        # what is traced depends on the GPU that it is traced for
        return wraps(function)(
            lambda *arrays, **options: jitted(*arrays, sms=hopper_sms(), **options)
        )

    return decorate


def multiprocessors() -> int:
    """Count those of the GPU that a kernel is traced for."""
    sms = hopper_sms()
    assert sms is not None, "a kernel is launched where `resolve` found a GPU"
    return sms


def launch(
    body: Callable[..., None],
    out_type: Any,
    *,
    scratch: Any,
    threads: int,
    tiles: int,
    name: str,
    blocks: int = 1,
    cluster: int = 1,
    **options: Any,
) -> Callable:
    """Make a kernel of `threads` warpgroups a block and `blocks` a multiprocessor.

    Fewer blocks where there are fewer `tiles`.

    The body reads its place from the axes "block" and "wg", and loops over its share of the tiles.

    Args:
        cluster: so many blocks, which the axis "cluster" tells apart, have one place on the axis
            "block" and share a tile.
        options: of Mosaic's compiler.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(min(multiprocessors() * blocks // cluster, tiles),),
        grid_names=("block",),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=threads,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(**options),
    )


def choose(number: Any, branches: list[Callable[[], None]]) -> None:
    """Run one of the branches."""
    if len(branches) == 1:
        return branches[0]()
    for i, branch in enumerate(branches):
        when(number == i)(branch)


def tiled(shape: tuple[int, ...], dtype: jnp.dtype, like: int = 0) -> Any:
    """Allocate shared memory whose rows are swizzled, as wgmma and TMA want operands.

    Args:
        like: numbers in a row of the other operand of a wgmma, where these differ.
    """
    return _swizzled(shape, dtype, like or shape[-1])


def halves(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Allocate `tiled` memory with rows whose two halves can be read apart."""
    return _swizzled(shape, dtype, shape[-1] // 2)


def _swizzled(shape, dtype, width):
    swizzle = plgpu.find_swizzle(width * jnp.dtype(dtype).itemsize * 8)
    columns = swizzle // jnp.dtype(dtype).itemsize
    # ty takes a method of the protocol that these classes inherit for an abstract one
    tiling = plgpu.TilingTransform((8, columns))  # ty: ignore[abstract-class-instantiation]
    swizzling = plgpu.SwizzleTransform(swizzle)  # ty: ignore[abstract-class-instantiation]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


def in_eights(columns: int) -> Any:
    """Lay out 8 numbers of a row in a thread, and whole rows of `columns` in a warp.

    A warp that loads or stores them meets no bank of shared memory twice at a time, where it is
    `tiled` like `columns`, of 8 bits or 16.
    """
    rows = 32 * 8 // columns
    tiles = plgpu.Tiling(((4 * rows, columns), (rows, columns), (8,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def whole_swizzles(columns: int, dtype: jnp.dtype) -> int:
    """Round `columns` up to what a tiled copy to global memory can end with: 128 bytes."""
    step = 128 // jnp.dtype(dtype).itemsize
    return -(-columns // step) * step


def copy_smem_to_gmem(source: Any, to: Any) -> None:
    """Start to copy from shared memory to a part of an array, which may reach beyond its sides.

    What lies beyond is not written where the memory is `tiled` or `halves`. All other copies may
    become copies of plain bytes (jax 0.11.2), of which nothing but what lies behind the array's
    last byte is left out: a part that reaches beyond its row overwrites the next row.

    Args:
        to: where the part begins is a multiple of its size.

    Raises:
        ValueError: a copy of plain bytes may reach beyond a row. The interpreter writes none of it.
    """
    if not any(isinstance(step, UnswizzleRef) for step in source.transforms):
        for part in to.transforms:
            for side, taken in list(zip(part.shape, part.indices, strict=True))[1:]:
                if isinstance(taken, pl.Slice) and side % taken.size:
                    raise ValueError(
                        f"{taken.size} numbers at a time of a side of {side} of "
                        f"{to.ref.aval.str_short()}: from memory that is not swizzled, the last "
                        "ones overwrite the next row; allocate whole parts"
                    )
    plgpu.copy_smem_to_gmem(source, to)


def saturate(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Clamp x to the range of an FP8 `dtype` and cast it.

    A GPU's cast saturates, JAX's on a CPU gives NaN.
    """
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round a float32 x to `dtype`, as float32.

    XLA, which interprets kernels, may drop a cast and its inverse.
    """
    return (
        x
        if dtype == jnp.float32
        else jax.lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)
    )

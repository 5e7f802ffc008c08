"""A Hopper kernel on a mesh whose axes are left to XLA: what of it each device computes.

XLA cannot look into a kernel, and would gather every operand on every device. So each kernel says
how its axes belong together, as in `einsum`: "m k, m b, n k, c b -> m n". A factor is split like
the first operand that has it split; one that is in no result is summed over devices, and where each
of these wants a part of the sum alone, it gets no other. A block of 128 is never split: where a
device's share is no whole number of blocks, it is gathered.

Inside `shard_map`, and on one device, a kernel is called as it is. (Where `shard_map` leaves an
axis to XLA, JAX 0.11 cannot say how an array is split over it; every device of that axis then
computes the whole.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Factors = tuple[tuple[str, ...], ...]


def on_mesh() -> bool:
    """Tell whether XLA splits arrays here.

    It does under `jax.set_mesh` with axes of type Auto, and outside of `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def partitioned(
    kernel: Callable[..., Any],
    rule: str,
    blocks: dict[str, tuple[str, int]],
    whole: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Make a kernel that is split over the mesh of the enclosing `jax.set_mesh`.

    Args:
        kernel: arrays -> an array, or a tuple of them. What is summed over devices is added in the
            result's dtype.
        rule: the factors of each operand's axes and of each result's, one word a factor.
        blocks: factor -> (the factor whose blocks it counts, the block's side): an axis of scales
            follows the axis it scales. Those that the rule does not have split nothing.
        whole: factors that every device needs all of.
    """
    if not on_mesh():
        return kernel
    left, right = rule.split("->")
    operands, results = (
        tuple(tuple(part.split()) for part in side.split(",")) for side in (left, right)
    )
    # in their order, as the rule wants them
    factors = dict.fromkeys(factor for names in operands for factor in names)
    factors |= dict.fromkeys(factor for names in results for factor in names)
    blocks = {factor: of for factor, of in blocks.items() if factor in factors}
    kept = tuple(factor for factor in factors if factor in blocks or factor in whole)
    written = {factor for names in results for factor in names}
    summed = tuple(factor for factor in factors if factor not in written and factor not in kept)
    call = custom_partitioning(lambda *arrays: kernel(*arrays))
    call.def_partition(
        partial(_partition, kernel, operands, results, blocks, whole, summed),
        sharding_rule=rule,
        reduction_factors=summed,
        need_replication_factors=kept,
    )
    return call


def _partition(
    kernel, operands: Factors, results: Factors, blocks, whole, summed, mesh, given, wanted
):
    split = splits(
        operands, blocks, whole, [(x.shape, _entries(x)) for x in given], dict(mesh.shape)
    )
    over = tuple(axis for factor in summed for axis in split.get(factor, ()))
    scattered = scatters(results, split, over, wanted, dict(mesh.shape)) if over else {}
    taken = {axis for axes in scattered.values() for axis in axes}

    def on_one_device(*arrays):
        out = kernel(*arrays)
        for place, axes in scattered.items():
            out = lax.psum_scatter(out, axes, scatter_dimension=place, tiled=True)
        rest = tuple(axis for axis in over if axis not in taken)
        return lax.psum(out, rest) if rest else out

    def sharding(names, scattered):
        axes = [split.get(blocks.get(f, (f,))[0], ()) for f in names]
        return NamedSharding(
            mesh,
            PartitionSpec(*((*of, *scattered.get(i, ())) or None for i, of in enumerate(axes))),
        )

    written = tuple(sharding(names, scattered) for names in results)
    return (
        mesh,
        on_one_device,
        written if len(written) > 1 else written[0],
        tuple(sharding(names, {}) for names in operands),
    )


def splits(
    operands: Factors, blocks: dict, whole: tuple, given: list, sizes: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """Choose the mesh axes of each factor that is split.

    Args:
        operands, blocks, whole: as `partitioned` has them.
        given: shape of each operand, and the mesh axes of each of its axes.
        sizes: of the mesh axes.
    """
    sides = dict(blocks.values())
    chosen: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for names, (shape, entries) in zip(operands, given, strict=True):
        for factor, side, axes in zip(names, shape, entries, strict=True):
            free = tuple(axis for axis in axes if axis not in used)
            parts = math.prod(sizes[axis] for axis in free)
            if factor in (*chosen, *blocks, *whole) or parts == 1:
                continue
            if side % (parts * sides.get(factor, 1)) == 0:
                chosen[factor] = free
                used |= set(free)
    return chosen


def scatters(
    results: Factors,
    split: dict[str, tuple[str, ...]],
    over: tuple[str, ...],
    wanted: Any,
    sizes: dict[str, int],
) -> dict[int, tuple[str, ...]]:
    """Choose which axes of a sum are scattered over mesh axes, as gradients of sharded weights are:
    those of which the program wants a part on each device. Nothing where there are two results.

    Args:
        results, split: factors, and the mesh axes of each.
        over: mesh axes that the sum goes over.
        wanted: the result as the program goes on with it, with its sharding.
        sizes: of the mesh axes.
    """
    found = {}
    if len(results) > 1:
        return found
    for place, (factor, side, axes) in enumerate(
        zip(results[0], wanted.shape, _entries(wanted), strict=True)
    ):
        axes = tuple(axis for axis in axes if axis in over)
        parts = math.prod(sizes[axis] for axis in (*split.get(factor, ()), *axes))
        if axes and side % parts == 0:
            found[place] = axes
    return found


def _entries(x: Any) -> list[tuple[str, ...]]:
    spec = tuple(x.sharding.spec) + (None,) * (len(x.shape) - len(x.sharding.spec))
    return [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    ]

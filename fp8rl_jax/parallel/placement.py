"""Placing policies, everything shaped like one, and batches on the mesh by the sharding rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel.distributed import to_global
from fp8rl_jax.parallel.rules import DEFAULT_RULES, ShardingRules, scale_spec


def policy_shardings(
    tree: Any, mesh: Mesh | AbstractMesh, rules: ShardingRules = DEFAULT_RULES
) -> Any:
    """Find the sharding of every leaf of a policy, in a tree of the same structure.

    Args:
        tree: a policy with stacked layers or a list of them, its leaves arrays, ShapeDtypeStructs
            or quantized tensors; or any tree that holds such weights, such as the optimizer state
            `optimizer.init(policy)`. A weight is a node with `axes` (logical names) and `weight`;
            what lies outside of one is replicated.
        mesh: from `make_mesh`.

    Returns:
        NamedShardings, for `jax.device_put` or for in_shardings and out_shardings of `jax.jit`.

    Raises:
        UserError: a tensor does not divide by its mesh axes; names the tensor and the sizes that
            fit.
    """

    def place(path, node):
        if not _is_weight(node):
            return replicated(mesh)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves, treedef = jax.tree.flatten(node)
        return jax.tree.unflatten(
            treedef, _weight_shardings(f"{name}.weight", node, len(leaves), mesh, rules)
        )

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=_is_weight)


def shard_policy(tree: Any, mesh: Mesh) -> Any:
    """Place the leaves of `tree` by `policy_shardings`; every process passes the same values."""
    return to_global(tree, policy_shardings(tree, mesh))


def moved(tree: Any, shardings: Any) -> Any:
    """Copy arrays to other devices, which each process has beside those that they are on.

    Each array is made whole on the devices that have it, one after the other, and cut from there:
    what the processes send each other is one gather, and the rest are copies inside of each.

    Args:
        tree: of arrays on one mesh.
        shardings: a tree of them, on another mesh of the same processes.
    """
    return jax.tree.map(_moved, tree, shardings)


def _moved(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    given = x.sharding
    if isinstance(given, NamedSharding) and not given.is_fully_replicated:
        x = _whole(replicated(given.mesh))(x)
    copies = [shard.data for shard in x.addressable_shards]
    parts = sharding.addressable_devices_indices_map(x.shape)
    pieces = [
        jax.device_put(copies[i % len(copies)][index], device)
        for i, (device, index) in enumerate(parts.items())
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)


@cache
def _whole(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def take_entry(x: Any, place: int) -> Any:
    """Take an entry of an array's first axis, on the devices that have the array."""
    if not isinstance(x, jax.Array):
        return x[place]
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return _taking(None)(x, place)
    return _taking(NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])))(x, place)


@cache
def _taking(sharding: NamedSharding | None) -> Callable[[jax.Array, int], jax.Array]:
    def take(x: jax.Array, place: int) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, place, keepdims=False)

    return jax.jit(take, out_shardings=sharding)


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """Give shapes their places, for what is lowered from shapes alone.

    Args:
        tree: of ShapeDtypeStructs.
        shardings: one for all leaves, or a tree of them.
    """
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: x.update(sharding=shardings), tree)
    return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), tree, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Make the sharding of arrays whose first axis is prompts or completions."""
    return NamedSharding(mesh, PartitionSpec(DEFAULT_RULES.mesh_axes("batch")))


def split_batch(tree: Any, count: int) -> Any:
    """Split batched arrays into `count` runs of neighbouring rows, on a new axis."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), tree)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Make the sharding of a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Count the shards into which the mesh splits a batch."""
    return math.prod(
        mesh.shape[axis] for axis in DEFAULT_RULES.mesh_axes("batch") if axis in mesh.shape
    )


def check_batch(rows: int, mesh: Mesh | AbstractMesh, key: str) -> None:
    """Refuse a batch that the mesh cannot split into equal shards.

    Rows of one prompt are neighbours, so it is the number of prompts that has to divide.

    Args:
        rows: size of the batch axis.
        key: the configuration key that sets it, such as "rollout.prompts_per_step".

    Raises:
        UserError: naming `key` and the mesh axes.
    """
    shards = batch_shards(mesh)
    if rows % shards:
        axes = [axis for axis in DEFAULT_RULES.mesh_axes("batch") if axis in mesh.shape]
        sizes = " x ".join(f"mesh.{axis} ({mesh.shape[axis]})" for axis in axes)
        raise UserError(
            f"{key} = {rows} does not divide by {sizes} = {shards}: make it a multiple of {shards}"
        )


def _is_weight(node: Any) -> bool:
    return hasattr(node, "axes") and hasattr(node, "weight")


def _weight_shardings(
    name: str, weight: Any, leaves: int, mesh: Mesh | AbstractMesh, rules: ShardingRules
) -> list[NamedSharding]:
    """Of the leaves of one weight, in their order: arrays of its shape, and of quantized ones the
    values, the scales and the outer scales, if any."""

    def is_quantized(part):
        return hasattr(part, "scales")

    specs: list[PartitionSpec] = []
    for part in jax.tree.leaves(weight.weight.get_value(), is_leaf=is_quantized):
        values = part.values if is_quantized(part) else part
        axes = weight.axes
        # a single layer, cut out of the stacked ones, keeps their names
        if axes[0] == "layers" and len(axes) == len(values.shape) + 1:
            axes = axes[1:]
        specs.append(own := rules.spec(axes, values.shape, mesh, name))
        if is_quantized(part):
            specs.append(scale_spec(own, values.shape, part.block, part.scales.shape, mesh))
        if is_quantized(part) and part.outer is not None:
            # one for each row or column, or for all
            sides = zip(values.shape[-2:], part.outer.shape[-2:], strict=True)
            m, n = (1 if side == count else side for side, count in sides)
            specs.append(scale_spec(own, values.shape, (m, n), part.outer.shape, mesh))
    if len(specs) != leaves:
        raise ValueError(f"{name}: {leaves} arrays in one weight, and shardings of {len(specs)}")
    return [NamedSharding(mesh, spec) for spec in specs]

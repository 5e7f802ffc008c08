"""Sharding rules: from the names of a tensor's axes to the axes of the mesh.

Modules say what an axis *is* ("heads", "embed"); only this table says where it lives: weights by
the rules that they are placed with, what is computed by `DEFAULT_RULES`. The mesh axes are of
type Auto: a sharding says where arrays are, XLA inserts the collectives, and the result is the same
function on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from fp8rl_jax.errors import UserError

_MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis, several of them, or None (replicated)."""

    embed: _MeshAxes = "fsdp"
    """Hidden width of a parameter, or width of the latents that it multiplies. Activations leave
    theirs whole (None in `constrain`): fsdp splits their rows."""
    heads: _MeshAxes = "tensor"
    """Query heads times head width. A size that splits a head is right, and slower."""
    kv_heads: _MeshAxes = "tensor"
    """Key and value heads, of parameters (times head width) and of the cache."""
    latent: _MeshAxes = None
    """Width of the latents that a parameter makes: every device needs all of them, for its heads,
    in the cache, too."""
    mlp: _MeshAxes = "tensor"
    """Feed-forward width."""
    experts: _MeshAxes = "expert"
    """Experts of a layer."""
    router: _MeshAxes = None
    """Rows of a router: every token is scored against all experts."""
    rank: _MeshAxes = None
    """Rank of an adapter: every device needs all of it."""
    vocab: _MeshAxes = "tensor"
    """Rows of the embedding and of the output head; columns of logits."""
    norm: _MeshAxes = None
    """Norm weights: too small to be worth a gather."""
    layers: _MeshAxes = None
    """The stacked layer axis: the scan walks it."""
    batch: _MeshAxes = ("data", "fsdp", "expert")
    """Prompts and completions."""

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """Mesh axes of a logical axis, () where it is replicated.

        Raises ValueError for a name without a rule.
        """
        if name is None:
            return ()
        if name not in self.__dataclass_fields__:
            raise ValueError(
                f"no sharding rule for axis {name!r} (known: "
                f"{', '.join(self.__dataclass_fields__)})"
            )
        axes = getattr(self, name)
        return (axes,) if isinstance(axes, str) else axes or ()

    def spec(
        self,
        axes: tuple[str | None, ...],
        shape: tuple[int, ...],
        mesh: Mesh | AbstractMesh,
        name: str = "tensor",
    ) -> PartitionSpec:
        """Find where a tensor lives.

        Args:
            axes: logical name of each axis; None is replicated.
            shape: its global shape.
            mesh: mesh axes that it does not have are skipped.
            name: of the tensor, for the error.

        Raises:
            UserError: an axis of the tensor does not divide by its mesh axes.
            ValueError: two axes of the tensor map to one mesh axis, an unknown name, or a wrong
                number of names.
        """
        if len(axes) != len(shape):
            raise ValueError(f"{name}: {len(axes)} axis names {axes} for shape {shape}")
        entries = []
        for logical, side in zip(axes, shape, strict=True):
            chosen = tuple(axis for axis in self.mesh_axes(logical) if axis in mesh.shape)
            shards = _shards(chosen, mesh)
            if side % shards:
                sizes = " x ".join(f"mesh.{axis} ({mesh.shape[axis]})" for axis in chosen)
                fits = ", ".join(str(n) for n in range(1, min(side, shards) + 1) if side % n == 0)
                raise UserError(
                    f"{name} {shape}: axis {logical} does not divide by {sizes}; use one of "
                    f"{fits} for it"
                )
            entries.append(chosen)
        return _partition_spec(entries)


DEFAULT_RULES = ShardingRules()
DECODE_RULES = replace(DEFAULT_RULES, embed=None)
"""Where the weights of a decode loop live, which would gather them in each of its steps."""


def scale_spec(
    values_spec: PartitionSpec,
    values_shape: tuple[int, ...],
    block: tuple[int, int],
    scales_shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
) -> PartitionSpec:
    """Find where the block scales of a quantized tensor live: with the values that they scale.

    An axis of the scales is sharded like that axis of the values where every shard boundary falls
    on a block boundary. Where one does not (SmolLM2's 576 columns in 128-blocks over two devices),
    a block belongs to two shards and that axis of the scales is replicated: they are block[0] *
    block[1] times fewer than the values, so a copy is cheap.

    Args:
        values_spec, values_shape: of the values [..., m, n].
        block: rows and columns that share a scale.
        scales_shape: [..., ceil(m / block[0]), ceil(n / block[1])].
        mesh: the mesh of `values_spec`.
    """
    entries = [_axes(entry) for entry in values_spec] + [()] * (
        len(values_shape) - len(values_spec)
    )
    sides = (1,) * (len(values_shape) - 2) + tuple(block)
    kept = []
    for entry, values, side, scales in zip(entries, values_shape, sides, scales_shape, strict=True):
        shards = _shards(entry, mesh)
        aligned = values % shards == 0 and (values // shards) % side == 0 and scales % shards == 0
        kept.append(entry if aligned else ())
    return _partition_spec(kept)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay `x` out by the logical names of its axes over the mesh of the enclosing `jax.set_mesh`.

    A no-op without a mesh, on one device, and for mesh axes that are not of type Auto (inside
    `jax.shard_map`). An axis of `x` that does not divide is left to the compiler, so that odd-sized
    batches of an evaluation still run.

    Args:
        axes: one name for each axis of x; None keeps that axis whole.
    """
    mesh, auto = jax.sharding.get_abstract_mesh(), left_to_xla()
    if not auto:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: {len(axes)} axis names {axes} for shape {x.shape}")
    entries = []
    for logical, side in zip(axes, x.shape, strict=True):
        chosen = _split_over(logical)
        entries.append(chosen if side % _shards(chosen, mesh) == 0 else PartitionSpec.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, _partition_spec(entries))


def devices_of(logical: str) -> int:
    """Count the devices over which XLA splits an axis of that name; 1 without a mesh."""
    return _shards(_split_over(logical), jax.sharding.get_abstract_mesh())


def splitting_axes(rows: int) -> tuple[str, ...]:
    """Find the mesh axes over which so many rows are split, for a `jax.shard_map` over these.

    None without a mesh, inside of such a `shard_map`, and where the rows do not divide: every
    device then has all of them.
    """
    return () if rows % devices_of("batch") else _split_over("batch")


def by_shards(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    axes: tuple[tuple[str | None, ...] | None, ...],
    results: Any,
) -> Any:
    """Run function(*operands) on each device's shard of them, in a `jax.shard_map`.

    For what needs no exchange, such as attention of rows and heads, and holds kernels, which XLA
    does not split. Without a mesh, on one device, and where no axis is left to XLA, it is called as
    it is.

    Args:
        operands: arrays, or trees of them: all that `function` reads.
        axes: of each operand the logical names of the axes that its arrays have, None where one
            stays whole, or None where the operand does. A name of which one array does not divide
            by its mesh axes is whole in all of them.
        results: a tree of such names, of the results.
    """
    mesh, auto = jax.sharding.get_abstract_mesh(), left_to_xla()
    if not auto:
        return function(*operands)
    split: dict[str | None, tuple[str, ...]] = {None: ()}
    for tree, names in zip(operands, axes, strict=True):
        for x in jax.tree.leaves(tree) if names else ():
            for name, side in zip(names or (), x.shape, strict=True):
                chosen = _split_over(name)
                fits = side % _shards(chosen, mesh) == 0
                split[name] = split.get(name, chosen) if fits else ()

    def spec(names: tuple[str | None, ...] | None) -> PartitionSpec:
        # an operand without arrays may name axes that no array has
        return _partition_spec([split.get(name, ()) for name in names or ()])

    def is_names(node: Any) -> bool:
        return isinstance(node, tuple) and all(x is None or isinstance(x, str) for x in node)

    given, out = tuple(map(spec, axes)), jax.tree.map(spec, results, is_leaf=is_names)
    return jax.shard_map(
        function, in_specs=given, out_specs=out, axis_names=set(auto), check_vma=False
    )(*operands)


def left_inside() -> tuple[str, ...]:
    """Find the axes that a `jax.shard_map` around this leaves to XLA, none outside of one.

    There kernels cannot say how they are split (pallas_kernels.partition).
    """
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return left_to_xla() if AxisType.Manual in kinds else ()


def left_to_xla() -> tuple[str, ...]:
    """Find the axes of the enclosing mesh along which XLA splits arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1)


def _split_over(logical: str | None) -> tuple[str, ...]:
    """The mesh axes of a logical one along which XLA splits arrays here."""
    auto = left_to_xla()
    return tuple(axis for axis in DEFAULT_RULES.mesh_axes(logical) if axis in auto)


def _axes(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _shards(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _partition_spec(entries) -> PartitionSpec:
    """The spec of one tuple of mesh axes a dimension, in jax's canonical spelling."""
    return PartitionSpec(
        *(None if e == () else e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries)
    )

"""Sharding rules: from the names of a tensor's axes to the axes of the mesh.

Modules say what an axis *is* ("heads", "embed"); only this table says where it lives. Sharding the
policy another way is another `ShardingRules`, and never an edit of the model. The mesh axes are of
type Auto: a sharding says where arrays are, XLA inserts the collectives, and the result is the same
function on any mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
            parts = _parts(chosen, mesh)
            if side % parts:
                sizes = " x ".join(f"mesh.{axis} ({mesh.shape[axis]})" for axis in chosen)
                fits = ", ".join(str(n) for n in range(1, min(side, parts) + 1) if side % n == 0)
                raise UserError(
                    f"{name} {shape}: axis {logical} does not divide by {sizes}; use one of "
                    f"{fits} for it"
                )
            entries.append(chosen)
        return _partition_spec(entries)


DEFAULT_RULES = ShardingRules()


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
        parts = _parts(entry, mesh)
        aligned = values % parts == 0 and (values // parts) % side == 0 and scales % parts == 0
        kept.append(entry if aligned else ())
    return _partition_spec(kept)


def constrain(x: jax.Array, *axes: str | None, rules: ShardingRules = DEFAULT_RULES) -> jax.Array:
    """Lay `x` out by the logical names of its axes over the mesh of the enclosing `jax.set_mesh`.

    A no-op without a mesh, on one device, and for mesh axes that are not of type Auto (inside
    `jax.shard_map`). An axis of `x` that does not divide is left to the compiler, so that odd-sized
    batches of an evaluation still run.

    Args:
        axes: one name for each axis of x; None keeps that axis whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if mesh.empty or not auto or mesh.size == 1:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: {len(axes)} axis names {axes} for shape {x.shape}")
    entries = []
    for logical, side in zip(axes, x.shape, strict=True):
        chosen = tuple(axis for axis in rules.mesh_axes(logical) if axis in auto)
        entries.append(chosen if side % _parts(chosen, mesh) == 0 else PartitionSpec.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, _partition_spec(entries))


def _axes(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _parts(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _partition_spec(entries) -> PartitionSpec:
    """The spec of one tuple of mesh axes a dimension, in jax's canonical spelling."""
    return PartitionSpec(
        *(None if e == () else e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries)
    )

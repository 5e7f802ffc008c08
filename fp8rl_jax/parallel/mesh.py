"""The device mesh: data x fsdp x expert x tensor.

`data` replicates the policy and splits the batch. `fsdp` splits the batch, too, and each parameter
along its hidden width, gathered where it is used. `expert` splits the batch, too, and the experts
of a mixture, to which rows travel. `tensor` splits heads, feed-forward width and vocabulary. Axes
of size 1 cost nothing, so one device is the mesh (1, 1, 1, 1) and runs the same program.

The rollout may have devices of its own (mesh.rollout): as many of each process, its last ones, so
that what it is served comes from a neighbour. They make a second mesh with the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import UserError

AXES = ("data", "fsdp", "expert", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the trainer's mesh, of all devices of all processes but those of the rollout's own; use
    it as `with jax.set_mesh(mesh):`.

    Args:
        config: sizes of the axes; one may be -1 and takes what is left.
        devices: default: every device. `data` is the outermost axis, so it is the one that runs
            between machines.

    Raises:
        UserError: a size is not positive, two are -1, or they do not multiply to the number of
            devices; or the rollout's own are no equal part of each process's.
    """
    devices, _ = _divided(config, devices)
    return _mesh(axis_sizes(config, len(devices)), devices)


def make_rollout_mesh(
    config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
    """Make the mesh of the rollout's own devices, None where it has none.

    Args:
        config, devices: as of `make_mesh`.

    Raises:
        UserError: they are no equal part of each process's devices, or would be all of them.
    """
    own = config.rollout
    if not own.size:
        return None
    return _mesh((own.data, 1, own.expert, own.tensor), _divided(config, devices)[1])


def _mesh(sizes: tuple[int, ...], devices: Sequence[jax.Device]) -> Mesh:
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=devices)


def _divided(
    config: MeshConfig, devices: Sequence[jax.Device] | None
) -> tuple[list[jax.Device], list[jax.Device]]:
    """The trainer's devices, and the rollout's own."""
    devices = jax.devices() if devices is None else list(devices)
    if not config.rollout.size:
        return devices, []
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    asked, processes = config.rollout.size, len(by_process)
    each, rest = divmod(asked, processes)
    fewest = min(map(len, by_process.values()))
    if rest or each >= fewest:
        raise UserError(
            f"mesh.rollout: data x expert x tensor = {asked} devices of its own; make it a "
            f"multiple of the {processes} processes, each of which has {fewest} devices and keeps "
            "at least one for the trainer"
        )
    split = [(own[: len(own) - each], own[len(own) - each :]) for own in by_process.values()]
    first, last = zip(*split, strict=True)
    return sum(first, []), sum(last, [])


def mesh_text(mesh: Mesh) -> str:
    """Write where a run is, such as "fsdp 2 x tensor 2 (4 devices, 2 processes)"."""
    processes = len({device.process_index for device in mesh.devices.flat})
    counts = (
        f"{count} {noun}{ending * (count > 1)}"
        for count, noun, ending in ((mesh.size, "device", "s"), (processes, "process", "es"))
    )
    return f"{axes_text(mesh.shape)} ({', '.join(counts)})".strip()


def axes_text(sizes: Mapping[str, int]) -> str:
    """Write the axes of a mesh that split something, such as "fsdp 2 x tensor 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def axis_sizes(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Find the sizes of AXES for so many devices; raises UserError as `make_mesh`."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise UserError(
                f"mesh.{axis} = {size}: give a positive size, or -1 for the devices that are left"
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        names = ", ".join(f"mesh.{axis}" for axis in free)
        raise UserError(f"{names} are all -1: at most one axis can take the devices that are left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    given = " x ".join(f"mesh.{axis} ({size})" for axis, size in sizes.items() if size != -1)
    if free:
        if devices % fixed:
            raise UserError(
                f"{given} = {fixed} does not divide the {devices} devices: choose sizes that do"
            )
        sizes[free[0]] = devices // fixed
    elif fixed != devices:
        raise UserError(
            f"{given} = {fixed}, but there are {devices} devices: set one of them to -1"
        )
    return tuple(sizes.values())

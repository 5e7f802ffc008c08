"""The device mesh: data x fsdp x expert x tensor.

`data` replicates the policy and splits the batch. `fsdp` splits the batch, too, and each parameter
along its hidden width, gathered where it is used. `expert` splits the batch, too, and the experts
of a mixture, to which rows travel. `tensor` splits heads, feed-forward width and vocabulary. Axes
of size 1 cost nothing, so one device is the mesh (1, 1, 1, 1) and runs the same program.
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
    """Make the mesh of all devices of all processes; use it as `with jax.set_mesh(mesh):`.

    Args:
        config: sizes of the axes; one may be -1 and takes what is left.
        devices: default: every device. `data` is the outermost axis, so it is the one that runs
            between machines.

    Raises:
        UserError: a size is not positive, two are -1, or they do not multiply to the number of
            devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh(
        axis_sizes(config, len(devices)),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices,
    )


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

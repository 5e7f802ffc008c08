"""A GPU that is not there, as something to compile for.

XLA compiles for a GPU from its description alone, if the packages jax-cuda13-plugin and
jax-cuda13-pjrt are installed; no driver and no card are needed. What it counts in such a program
(bytes, operations) holds for that GPU, but for what a live card's autotuning would choose
otherwise. Seconds need the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

from fp8rl_jax.errors import UserError


@dataclass(frozen=True)
class Target:
    """The device's name, and the sharding of a program that runs on it alone."""

    name: str
    sharding: jax.sharding.Sharding


def load_target(file: str) -> Target | None:
    """The device that a file describes (XLA's GpuTargetConfigProto in text form); None for no file.

    Raises:
        UserError: the file cannot be read, is no description, or the packages are missing.
    """
    if not file:
        return None
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--gpu-target: {file} cannot be read ({error})") from None
    named = re.search(r'device_description_str: *"([^"]+)"', text)
    if named is None:
        raise UserError(
            f"--gpu-target: {file} has no device_description_str; it must be a "
            "GpuTargetConfigProto in text form"
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=text, topology="1x1x1"
        )
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--gpu-target: {reason}; it needs jax-cuda13-plugin and jax-cuda13-pjrt of jax's "
            "version"
        ) from None
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return Target(named[1], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))

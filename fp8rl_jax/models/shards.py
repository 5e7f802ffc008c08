"""How mesh axes that XLA would split by itself split a weight, where each device is to multiply its
own part.

XLA cannot look into kernels, and inside of a `jax.shard_map` kernels cannot say how they are split:
left to XLA, a weight would be gathered there each time that it is multiplied.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from fp8rl_jax.models.lora import Adapted
from fp8rl_jax.models.policy import FeedForward, Tensor, Weight
from fp8rl_jax.parallel import DECODE_RULES, policy_shardings
from fp8rl_jax.precision import input_splits, output_splits


class Split(NamedTuple):
    """The mesh axes that split a weight, none where it stays whole, and whether they split what is
    contracted."""

    over: tuple[str, ...] = ()
    contracted: bool = False


def split_of(weight: Tensor, axes: tuple[str, ...], mesh: AbstractMesh) -> Split:
    """Find which of those axes split a linear's weight; an adapter follows its base.

    None do where a block of its scales, or of its input's, is of two devices.
    """
    base = weight.base if isinstance(weight, Adapted) else weight
    if not isinstance(base, Weight):
        return Split()
    values, *scales = [
        tuple(s.spec) for s in jax.tree.leaves(policy_shardings(base, mesh, DECODE_RULES))
    ]
    sides = values[-2:] + (None,) * (2 - len(values[-2:]))
    for contracted, entry in enumerate(sides):
        over = (entry,) if isinstance(entry, str) else entry or ()
        if over and set(over) <= set(axes) and all(entry in spec for spec in scales):
            parts = math.prod(mesh.shape[axis] for axis in over)
            if contracted and not input_splits(weight.value, parts):
                break
            return Split(over, bool(contracted))
    return Split()


def split_of_experts(
    experts: FeedForward, axes: tuple[str, ...], mesh: AbstractMesh
) -> tuple[str, ...]:
    """Find which of those axes split the width of all experts: none where one of the three weights,
    or a gradient of the outputs of the first two, is not split at whole blocks."""
    gate, up, down = (
        split_of(w, axes, mesh) for w in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    parts = math.prod(mesh.shape[axis] for axis in gate.over)
    fits = all(output_splits(w.value, parts) for w in (experts.gate_proj, experts.up_proj))
    return gate.over if gate == up and down == Split(gate.over, True) and fits else ()


def shards_of_experts(
    experts: FeedForward, holders: tuple[str, ...], wide: tuple[str, ...], mesh: AbstractMesh
) -> FeedForward:
    """Find the PartitionSpec of each array of the experts: their count split over `holders`, their
    width over `wide`."""
    rules = replace(DECODE_RULES, experts=holders or None, mlp=wide or None)
    return jax.tree.map(lambda s: s.spec, policy_shardings(experts, mesh, rules))

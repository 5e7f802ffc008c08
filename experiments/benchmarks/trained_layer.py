"""A trainer's layer in FP8 against bfloat16: bytes read and written, bytes kept for the backward,
seconds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.contest import OURS, contest
from experiments.benchmarks.layer_parts import PARTS, TrainedLayer, accessed_bytes, saved_bytes
from experiments.benchmarks.record import result
from experiments.benchmarks.rounds import Plan, Side
from experiments.benchmarks.step import Laps
from experiments.benchmarks.target import Target
from experiments.benchmarks.workloads import Workload
from fp8rl_jax.config.recipe import RECIPES

SETTINGS = {
    "linear": "gate_proj; forward and backward in one program, the trainer's weights made from "
    "float32 masters in it",
    "layer": "the whole layer, no rematerialization, attention in chunks where the library's "
    "default has them",
}
TIMED = ("linear", "layer")


def trained_layer(workload: Workload, plan: Plan, target: Target | None = None) -> dict[str, Any]:
    """Counts and times the layer of `workload.layer`.

    Args:
        target: a GPU that need not be there; programs are compiled and counted for it, too.

    Returns:
        The entry. "bytes" has recipe -> part -> what was counted: "saved", and "accessed" by device
        and program. "byte_ratios" divide the first recipe's by each other's, as "ratios" do
        seconds: above 1, `under` has fewer.
    """
    shape, dtype = workload.layer, jnp.dtype(workload.compute_dtype)
    layers = {
        recipe: TrainedLayer(
            workload.config,
            RECIPES[recipe],
            shape.rows,
            shape.prompt_tokens + shape.new_tokens,
            dtype,
        )
        for recipe in workload.layer_recipes
    }
    counted = {
        recipe: {part: _bytes(layer, part, target) for part in PARTS}
        for recipe, layer in layers.items()
    }
    sides = {recipe: _side(layer) for recipe, layer in layers.items()}
    entry = result("trained_layer", workload, shape, contest(sides, SETTINGS, (), plan))
    return entry | {"bytes": counted, "byte_ratios": byte_ratios(counted)}


def byte_ratios(counted: dict[str, dict[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """Every count of the first recipe over the same of each other one."""
    first, *others = counted
    return [
        {
            "over": OURS + first,
            "under": OURS + other,
            "part": f"{part}, {what}",
            "ratio": value / counted[other][part][what],
        }
        for other in others
        for part, counts in counted[first].items()
        for what, value in counts.items()
    ]


def _bytes(layer: TrainedLayer, part: str, target: Target | None) -> dict[str, int]:
    counts = {"saved": saved_bytes(layer, part)}
    devices = {jax.default_backend(): None} | (
        {} if target is None else {target.name: target.sharding}
    )
    for device, sharding in devices.items():
        for program, value in accessed_bytes(layer, part, sharding).items():
            counts[f"accessed by {program} on {device}"] = value
    return counts


def _side(layer: TrainedLayer) -> Side:
    masters = jax.jit(layer.masters)()
    work = {
        part: (
            jax.jit(layer.programs(part)["forward_and_backward"]),
            jax.jit(layer.inputs, static_argnums=0)(part),
        )
        for part in TIMED
    }

    def run(number: int) -> dict[str, float]:
        laps = Laps()
        for part, (program, inputs) in work.items():
            laps.end(part, program(inputs, masters))
        return laps.seconds

    return run

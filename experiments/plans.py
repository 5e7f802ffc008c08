"""The best meshes for models of 8 to 405 billion parameters: `python -m experiments.plans`.

What `fp8rl plan` models of them: memory, and how long a step takes at least. Nothing is compiled or
run. Each model learns from prompts of 1,024 tokens with 8 completions of 2,048, a prompt a device
and more, layer by layer rematerialized, a micro-batch of a prompt a shard.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.config.run import PlanConfig, RolloutConfig, RunConfig
from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.parallel.mesh import AXES
from fp8rl_jax.training.roofline import Outlook, best_meshes, outlook
from fp8rl_jax.weights.hf_config import read_policy_config

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "plans.json"
RECIPES = ("bf16", "fp8-rl", "jet-rl")
PLANS = (
    ("qwen3-8b", 8, ("bf16", "fp8-rollout", "fp8-rl", "jet-rl", "fp8-e2e", "fp8-e2e-kv")),
    ("qwen3-8b", 64, RECIPES),
    ("qwen3-8b", 512, RECIPES),
    ("qwen3-32b", 32, RECIPES),
    ("qwen3-30b-a3b", 16, RECIPES),
    ("llama-3.1-405b", 512, RECIPES),
)
"""Shape, devices, recipes."""


@dataclass(frozen=True)
class Arguments:
    """The best meshes of several models."""

    chip: str = "h200"
    """Of fp8rl_jax/config/chips.py."""
    output: str = str(RECORD.relative_to(ROOT))
    """Record."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        known = ", ".join(CHIPS)
        return [] if self.chip in CHIPS else [f"--chip: {self.chip!r} is none of {known}"]


def configured(recipe: str, devices: int, chip: str) -> RunConfig:
    """The run that is planned."""
    return RunConfig(
        recipe=recipe,
        rollout=RolloutConfig(max(128, devices), 8, 1024, 2048, decode_layers="scan"),
        trainer=TrainerConfig(remat="layer"),
        plan=PlanConfig(chip, devices),
    )


def planned(
    shape: str, devices: int, recipe: str, chip: str, alike: dict[str, int] | None = None
) -> dict[str, Any]:
    """Plan one model under one recipe: its best mesh, how many fit, and the seconds on the mesh
    `alike`, for what the recipe alone changes."""
    policy = read_policy_config(ROOT / "experiments" / "shapes" / shape)
    config = configured(recipe, devices, chip)
    found = best_meshes(policy, config, devices, CHIPS[chip])
    best: Outlook | None = found[0] if found else None
    told = {"shape": shape, "devices": devices, "recipe": recipe, "fits": len(found)}
    if best is None:
        return told
    if alike is not None:
        sizes = dict.fromkeys(AXES, 1) | alike
        told["seconds_alike"] = outlook(policy, config, sizes, CHIPS[chip]).seconds
    return told | {
        "mesh": {axis: size for axis, size in best.sizes.items() if size > 1},
        "prompts": config.rollout.prompts_per_step,
        "bytes": best.peak,
        "seconds": best.seconds,
        "tokens": best.tokens,
    }


def run(arguments: Arguments) -> None:
    """Plan all of them, and write the record."""
    plans = []
    for shape, devices, recipes in PLANS:
        alike = None
        for recipe in recipes:
            plans.append(planned(shape, devices, recipe, arguments.chip, alike))
            alike = alike or plans[-1]["mesh"]  # of bf16, the first
            print(json.dumps(plans[-1]), flush=True)
    made = facts("experiments.plans", [])
    record = {"made": made, "chip": arguments.chip, "plans": plans}
    write(Path(arguments.output), record)


if __name__ == "__main__":
    sys.exit(run_command("plans", Arguments, run, sys.argv[1:]))

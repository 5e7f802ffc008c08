"""Which precision of a training state breaks what is learned: `python -m experiments.fp8_lm`.

FP8-LM (arXiv 2310.18313, section 4.3) takes the states of AdamW one by one into few bits, and finds
that a second moment in e4m3 is the one that breaks. Here each arm is a row of formats of masters,
gradients and moments (recipe.STATE_ROLES) in the supervised study of formats/learning.py: the
demo's policy from random weights, float32 compute, of one seed the same start and the same examples
for all arms. What is compared is the mean negative log-likelihood of a held-out answer's token.

What has been measured is on disk at once, and the same command goes on.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from experiments.command import run_command
from experiments.depth import short
from experiments.formats.__main__ import Record
from experiments.formats.learning import held_out_loss, run_config, trained
from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.config.recipe import Recipe, recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.models.policy import init_policy, tensor_specs
from fp8rl_jax.parallel import AXES, policy_shardings
from fp8rl_jax.statistics import compare_arms
from fp8rl_jax.weights.hf_config import read_policy_config

BASELINE = "float32"
RECORD = Path(__file__).parent / "results" / "fp8_lm.json"
MARGIN = 0.05
"""Nats of loss up to which an arm counts as no worse."""
SCALED = "power_of_two"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "second moment e4m3": {"second_moment": f"e4m3-{SCALED}", "second_moment_rounding": "nearest"},
    "second moment e4m3-1x128, drawn": {"second_moment": "e4m3-1x128"},
    "fp8-lm-o2": {"base": "fp8-lm-o2"},
    "master bfloat16": {"master": "bfloat16"},
    "fp8-lm-o1": {"base": "fp8-lm-o1"},
    "fp8-lm-o3": {"base": "fp8-lm-o3"},
    "first moment e4m3": {"first_moment": f"e4m3-{SCALED}"},
    "second moment float16": {
        "second_moment": f"float16-{SCALED}",
        "second_moment_rounding": "nearest",
    },
    "second moment e4m3, drawn": {"second_moment": f"e4m3-{SCALED}"},
    "second moment e4m3-1x128": {
        "second_moment": "e4m3-1x128",
        "second_moment_rounding": "nearest",
    },
    "second moment bfloat16": {"second_moment": "bfloat16", "second_moment_rounding": "nearest"},
    "second moment bfloat16, drawn": {"second_moment": "bfloat16"},
    "master float16, scaled": {"master": f"float16-{SCALED}"},
    "master float16": {"master": "float16"},
    "master bfloat16, drawn": {"master": "bfloat16", "master_rounding": "stochastic"},
    "master e4m3": {"master": f"e4m3-{SCALED}"},
    "master e4m3, drawn": {"master": f"e4m3-{SCALED}", "master_rounding": "stochastic"},
}
"""In the order in which they are measured: a base (bf16), and what differs from it. "drawn" is
rounded stochastically, the others to nearest; a scale is of a matrix, or of 128 of a row."""


@dataclass(frozen=True)
class Arguments:
    """Train a small policy with its state kept in few bits, arm by arm and seed by seed."""

    arms: tuple[str, ...] = ()
    """Of the study's; default: all."""
    output: str = str(RECORD)
    """The record; entries that are there are kept."""
    seeds: int = 5
    """Of each arm."""
    steps: int = 100
    """Supervised updates."""
    batch_size: int = 16
    """Examples an update."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        faults = [
            f"--arms: {name} unknown ({', '.join(ARMS)})" for name in self.arms if name not in ARMS
        ]
        return faults + [
            f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least 1"
            for name in ("seeds", "steps", "batch_size")
            if getattr(self, name) < 1
        ]


def run(arguments: Arguments) -> None:
    """Seed by seed, so that what is there is paired."""
    keep_compiled_programs()
    settings = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    record = Record(Path(arguments.output), settings, "experiments.fp8_lm")
    config = run_config(arguments.steps, arguments.batch_size)
    for seed in range(arguments.seeds):
        for name in arguments.arms or ARMS:
            if record.has(arm=name, seed=seed):
                continue
            print(f"{name}, seed {seed}", file=sys.stderr)
            record.add(arm=name, seed=seed, **loss(config, name, seed))


def of_arm(name: str) -> Recipe:
    """What an arm trains under."""
    return recipe(**({"base": "bf16", "name": "fp8-lm"} | ARMS[name]))


def loss(config: RunConfig, name: str, seed: int) -> dict[str, float | None]:
    """Train an arm with a seed, and find its held-out loss and that of its last step; None: not
    finite."""
    session, metrics = trained(replace(config, seed=seed), of_arm(name))
    found = {"loss": held_out_loss(session), "last_step": np.float64(metrics[-1]["loss"])}
    return {key: short(x) if np.isfinite(x) else None for key, x in found.items()}


def rows(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Give the cells of the record's table: arm, loss, differences to the baseline.

    By seed, and in the mean. An arm has its row once it has all seeds of the baseline.
    """
    of: dict[str, dict[int, float | None]] = {}
    for entry in entries:
        of.setdefault(entry["arm"], {})[entry["seed"]] = entry["loss"]
    seeds = of[BASELINE].keys()
    measured = [name for name in ARMS if name in of and of[name].keys() >= seeds]
    losses = {name: [of[name][seed] for seed in seeds] for name in measured}
    whole = {name: np.asarray(each) for name, each in losses.items() if None not in each}
    compared = compare_arms(whole, BASELINE, MARGIN, better="lower") if len(whole) > 1 else {}
    found = []
    for name, each in losses.items():
        if name not in whole:
            lost = each.count(None)
            found.append([name, "", f"{lost} of {len(each)} seeds diverged", ""])
            continue
        cells = [name, f"{whole[name].mean():.3f}"]
        if name == BASELINE:
            found.append([*cells, "baseline", ""])
            continue
        apart, c = whole[name] - whole[BASELINE], compared[name]
        level = "" if abs(c.alpha - 0.05) < 1e-9 else f"{100 * (1 - c.alpha):.4g} %: "
        limits = f"({level}{c.difference.low:+.3f} to {c.difference.high:+.3f})"
        seen = "" if c.detectable is None else f"; {c.detectable:.3f}"
        cells += [f"{apart.min():+.3f} to {apart.max():+.3f}"]
        found.append([*cells, f"{c.difference.mean:+.3f} {limits}: {c.verdict}{seen}"])
    return found


def placement(devices: int) -> tuple[float, float]:
    """Find how full the fullest device is beside the mean, for the parameters of Qwen3-8B.

    Returns:
        Of FP8 ZeRO, which gives whole tensors, the largest first, to the device that has least; and
        of the fsdp axis here.
    """
    shape = read_policy_config(Path(__file__).parent / "shapes" / "qwen3-8b")
    tensors, held = [], [0] * devices
    for sides, axes in tensor_specs(shape).values():
        count = sides[0] if axes[0] == "layers" else 1
        tensors += [math.prod(sides) // count] * count
    for size in sorted(tensors, reverse=True):
        heapq.heapreplace(held, held[0] + size)
    mesh = AbstractMesh((1, devices, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    policy = jax.eval_shape(lambda: init_policy(shape, jax.random.key(0)))
    placed = jax.tree.leaves(policy_shardings(policy, mesh)), jax.tree.leaves(policy)
    own = sum(math.prod(of.shard_shape(x.shape)) for of, x in zip(*placed, strict=True))
    mean = sum(tensors) / devices
    return max(held) / mean, own / mean


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("fp8_lm", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

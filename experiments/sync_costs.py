"""What it costs to see whether updates arrive, and to round so that they do: `python -m
experiments.sync_costs`, on a quiet machine.

Weight syncs of SmolLM2-135M's shape with random weights, in turns: as they are, with sync/*
measured (`rollout.arrival`), and with weights rounded stochastically (`precision.weight_rounding`).
Dithered masters are drawn once, at the start, and cost a sync nothing. Of each the median of the
time over the plain one's of the same round, with its quartiles.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.config.run import PrecisionConfig, RunConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.engine import LocalEngine, local_engine
from fp8rl_jax.training.source import find_model
from fp8rl_jax.weights.hf_config import read_policy_config

CASES = (
    ("bf16", "bfloat16"),
    ("fp8-rollout", "bfloat16"),
    ("bf16", "float32"),
    ("fp8-rollout", "float32"),
)
"""Recipe and compute dtype."""


@dataclass(frozen=True)
class Arguments:
    """Time weight syncs."""

    output: str = "experiments/results/arrival/costs.json"
    """JSON file."""
    rounds: int = 15
    """Of all kinds in turns."""
    layers: int = 30
    """Of SmolLM2's."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        given = {"--rounds": self.rounds, "--layers": self.layers}
        return [f"{name}: {value} must be at least 1" for name, value in given.items() if value < 1]


def engines(recipe: str, dtype: Any) -> dict[str, LocalEngine]:
    """Make an engine of each kind."""

    def made(**precision: Any) -> LocalEngine:
        config = RunConfig(
            recipe=recipe, compute_dtype=dtype, precision=PrecisionConfig(**precision)
        )
        engine = local_engine(config, config.resolved_recipe)
        assert isinstance(engine, LocalEngine)
        return engine

    found = {"plain": made(), "measured": made()}
    found["measured"].arrival = Arrival()
    if dtype != "float32":  # nothing is rounded there but by the format
        found["stochastic"] = made(weight_rounding="stochastic")
    return found


def ratios(recipe: str, dtype: str, arguments: Arguments) -> dict[str, list[float]]:
    """Time each kind over the plain one: lower quartile, median and upper quartile."""
    shape = replace(read_policy_config(find_model("smollm2-135m")), num_layers=arguments.layers)
    masters = [init_policy(shape, jax.random.key(seed)) for seed in range(2)]
    kinds = engines(recipe, dtype)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds + 2):
        for kind, engine in kinds.items():
            began = time.perf_counter()
            engine.sync(masters[number % 2])
            engine.wait()
            seconds[kind].append(time.perf_counter() - began)
    times = {kind: np.array(each[2:]) for kind, each in seconds.items()}  # without compiling
    return {
        kind: np.quantile(each / times["plain"], (0.25, 0.5, 0.75)).round(3).tolist()
        for kind, each in times.items()
        if kind != "plain"
    }


def run(arguments: Arguments) -> None:
    """Time every case."""
    found = {f"{recipe}, {dtype}": ratios(recipe, dtype, arguments) for recipe, dtype in CASES}
    write(
        Path(arguments.output),
        {
            "over plain": found,
            "arguments": vars(arguments),
            "made": facts("experiments.sync_costs"),
        },
    )


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("sync_costs", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

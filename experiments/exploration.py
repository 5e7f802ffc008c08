"""How much less sure of itself a policy is by the format of its base and by QeRL's noise:
`python -m experiments.exploration`.

The unquantized policy continues the prompts of experiments/depth.py, once. The same tokens are then
read by the policy as each base and each sigma serve it (`rollout.noise`, one draw a sync, several
draws), so that the weights are all that differs. Of each: the entropy of the distribution over the
next token, less that of the same base without noise (of a base without noise: less that of the
unquantized one), and k3 between the two. Intervals are over prompts, of means over draws.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.depth import MODEL, model, prompts, short
from experiments.record import write
from fp8rl_jax.compare.probe import with_entropies
from fp8rl_jax.compare.tokens import Tokens
from fp8rl_jax.config.recipe import recipe
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rl.metrics import k3
from fp8rl_jax.rollout.noise import on_norms
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.statistics import t_interval

BASES = {"bf16": "", "fp8": "e4m3-128x128", "nvfp4": "nvfp4", "int4": "int4-1x128"}
"""Formats of a frozen base, as in experiments/ablations/qerl.toml."""
SIGMAS = (1e-3, 1e-2, 5e-2)
"""The paper's are 1e-2 to 1e-4, or 5e-2 to 5e-4."""


@dataclass(frozen=True)
class Arguments:
    """Entropy of SmolLM2-135M by the format of its base and by the noise on its norms."""

    output: str = "experiments/results/exploration.json"
    """JSON file."""
    tokens: int = 32
    """Of a completion."""
    draws: int = 3
    """Of the noise, at each sigma."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        given = {"--tokens": self.tokens, "--draws": self.draws}
        return [f"{name}: {value} must be at least 1" for name, value in given.items() if value < 1]


@partial(jax.jit, static_argnums=2)
def _noisy(policy: Policy, key: jax.Array, sigma: float) -> Policy:
    """In the second of three stages, which is the first with noise."""
    return on_norms(policy, SyncContext(1, key, None, 3), start=sigma, end=sigma, stages=3)


def measure(policy: Policy, arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Give a row of each base and each sigma, 0 first."""
    given, dtype = prompts(), jnp.dtype("float32")
    read, serve = jax.jit(with_entropies), jax.jit(rollout_policy, static_argnums=(1, 2, 3))

    def served_as(weight: str) -> Policy:
        formats = {"rollout.weight": weight} if weight else {}
        return serve(policy, recipe("bf16", "base", **formats), dtype, False)[0]

    sampling = Sampling(max_new_tokens=arguments.tokens)
    unquantized = served_as("")
    sampled = generate(unquantized, *given, jax.random.key(0), samples=1, sampling=sampling)
    tokens = Tokens(given.tokens, given.lengths, sampled.tokens, sampled.mask.sum(1))
    start, mask = read(unquantized, tokens), np.asarray(tokens.masks.completion)

    def by_prompt(x):
        return np.where(mask, np.asarray(x, np.float64), 0.0).sum(1) / mask.sum(1)

    for base, weight in BASES.items():
        served = served_as(weight)
        own = read(served, tokens)
        for sigma in (0.0, *SIGMAS):
            against, found = (own, []) if sigma else (start, [own])
            for key in jax.random.split(jax.random.key(1), arguments.draws) if sigma else ():
                found.append(read(_noisy(served, key, sigma), tokens))
            entropy = np.mean([by_prompt(entropies) for _, entropies in found], axis=0)
            less = t_interval(list(entropy - by_prompt(against[1])))
            yield {
                "base": base,
                "sigma": sigma,
                "entropy": short(entropy.mean()),
                "less": {x: short(getattr(less, x)) for x in ("mean", "low", "high")},
                "k3": short(np.mean([by_prompt(k3(of - against[0])) for of, _ in found])),
                "tokens": int(mask.sum()),
            }


def run(arguments: Arguments) -> None:
    """Measure and write the record."""
    rows = []
    for row in measure(model("smollm2"), arguments):
        rows.append(row)
        print(row, flush=True)
    found = {"model": MODEL, "prompts": len(prompts().tokens), "draws": arguments.draws}
    write(Path(arguments.output), facts("experiments.exploration") | found | {"rows": rows})


if __name__ == "__main__":
    sys.exit(run_command("exploration", Arguments, run, sys.argv[1:]))

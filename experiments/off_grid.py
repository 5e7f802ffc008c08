"""SmolLM2-135M beside the 4-bit grid that its file has it on: `python -m experiments.off_grid`.

The one real model that a package ships was quantized to 4 bits (Q4_1: 32 weights in a row share 16
values) before it was widened to bfloat16. Here each weight is multiplied by a normal number around
1 and rounded to bfloat16, as a checkpoint that was trained in bfloat16 has its weights: anywhere on
that grid.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import run_command
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.training.source import find_model
from fp8rl_jax.weights.load import load_policy, save_policy

GROUP, VALUES = 32, 16
"""Of Q4_1."""


@dataclass(frozen=True)
class Arguments:
    """Write a model whose weights lie on no 4-bit grid, and say how many of them did."""

    model: str = "smollm2-135m"
    """That is changed."""
    output: str = "runs/smollm2-off-grid"
    """Directory of the other one."""
    sigma: float = 2.0**-5
    """Of a weight's factor."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return [] if 0 < self.sigma < 1 else [f"--sigma: {self.sigma} must be between 0 and 1"]


def on_grid(policy: Policy) -> float:
    """Compute the share of groups of 32 weights of linears that have no more values than 4 bits."""
    few = count = 0
    for x in map(np.asarray, jax.tree.leaves(policy.layers)):
        if x.ndim > 2:
            groups = np.sort(x.reshape(-1, GROUP), axis=1)
            few += int(((np.diff(groups) != 0).sum(axis=1) < VALUES).sum())
            count += len(groups)
    return few / count


def beside(policy: Policy, sigma: float) -> Policy:
    """Multiply each weight of a matrix by 1 + sigma times a normal number."""
    leaves, tree = jax.tree.flatten(policy)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def moved(x: jax.Array, key: Any) -> jax.Array:
        if x.ndim < 3 and x.shape[0] != policy.config.vocab_size:
            return x  # a norm
        return x * (1 + sigma * jax.random.normal(key, x.shape, jnp.float32))

    return tree.unflatten([moved(x, key) for x, key in zip(leaves, keys, strict=True)])


def run(arguments: Arguments) -> None:
    """Write it, with the tokenizer's files."""
    source = find_model(arguments.model)
    before = load_policy(source)
    save_policy(beside(before, arguments.sigma), arguments.output, source)
    shares = [on_grid(x) for x in (before, load_policy(arguments.output))]
    print(
        f"{arguments.output}: {shares[1]:.1%} of its groups of {GROUP} weights have at most "
        f"{VALUES} values, {shares[0]:.1%} of {arguments.model}'s"
    )


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("off_grid", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

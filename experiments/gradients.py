"""What FP8 does to a gradient, and what the layout of its batch does: `python -m
experiments.gradients --output FILE`.

One GRPO update's gradient of the demo's warm-started policy (`fp8rl sft
experiments/runs/demo.toml`), 8 prompts with 8 samples each, random advantages, bfloat16, five
batches. The relative distance ||g - h|| / ||h|| of all linears' gradients:

    quantization    jet-rl's against bf16's, the same batch and layout
    micro-batches   the recipe's in 2, 4 and 8 micro-batches against its own in one
    padding         the same rows with 8 and with 120 empty columns more
    packed          packed rows, packed apart for 4 micro-batches, against one
    whole groups    the same split of prompts and completions that are 128 tokens wide: no group of
                    128 spans two rows
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.behaviour import measured
from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.models.policy import LINEARS
from fp8rl_jax.parallel import make_mesh
from fp8rl_jax.rollout.engine import LocalEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.batch import narrow
from fp8rl_jax.training.state import init_state
from fp8rl_jax.training.step import Batch, StepConfig, update
from fp8rl_jax.weights.load import load_policy

SETS, PROMPTS, SAMPLES, WIDTH, NEW = 5, 8, 8, 8, 8
RECIPES_MEASURED = ("bf16", "jet-rl")
RL = RLConfig(correction=CorrectionConfig(method="none"))


@dataclass(frozen=True)
class Arguments:
    """Distances between gradients of one batch."""

    output: str = "experiments/results/gradients/results.json"
    """File of the results."""
    model: str = "runs/warm-start/model"
    """The demo's warm start."""


def batch_of(policy, number: int) -> Batch:
    """Completions of the warm-started policy, with random advantages."""
    rng = np.random.default_rng(number)
    words = [
        [*rng.integers(97, 123, rng.integers(3, 5)).tolist(), ord("=")] for _ in range(PROMPTS)
    ]
    engine = LocalEngine(RECIPES["bf16"], jnp.bfloat16, backend="reference")
    engine.sync(policy)
    prompts = pad_prompts(words, list(range(PROMPTS)), WIDTH)
    sampling = Sampling(max_new_tokens=NEW, stop_token_ids=policy.config.eos_token_ids)
    made = engine.generate(prompts, SAMPLES, sampling, jax.random.key(number))
    advantages = rng.normal(size=PROMPTS * SAMPLES).astype(np.float32)
    fields = (jax.tree.map(np.asarray, x) for x in (made.tokens, made.mask, made.policy_logprobs))
    return Batch(prompts.tokens, prompts.lengths, *fields, advantages)


def padded(batch: Batch, columns: int, of_prompts: int = 0) -> Batch:
    """Empty columns behind the completions, and behind the prompts."""
    wider = {
        name: np.pad(getattr(batch, name), ((0, 0), (0, columns)))
        for name in ("tokens", "mask", "rollout_logprobs")
    }
    return replace(batch, **wider, prompts=np.pad(batch.prompts, ((0, 0), (0, of_prompts))))


# so large a step that the change of a weight is its gradient to the last bits
STEP = 2.0**20


@jax.tree_util.register_static
class Descent:
    """Gradient descent, a `training.optimizer.Optimizer`."""

    recipe = RECIPES["bf16"]

    def init(self, params) -> tuple:
        return ()

    def step(self, params, gradients, state, norm, updates, keep=True):
        return jax.tree.map(lambda w, g: w - STEP * g, params, gradients), state, jnp.bool_(True)


_OPTIMIZER = Descent()


def gradient(
    policy, batch: Batch, recipe: str, parts: int = 1, dtype: str = "bfloat16"
) -> np.ndarray:
    """Of all linears, flat."""
    config = StepConfig(
        RECIPES[recipe], RL, dtype, temperature=1.0, micro_batches=parts, backend="reference"
    )
    state, _, metrics = update(
        init_state(jax.tree.map(jnp.copy, policy), _OPTIMIZER), batch, config, _OPTIMIZER
    )
    if float(metrics["optim/skipped"]):
        raise RuntimeError(f"{recipe}: the gradient is not finite")
    tensors, before = state.policy.layers.tensors(), policy.layers.tensors()
    linears = [name for name in LINEARS if name in tensors]
    moved = [(before[name].value - tensors[name].value) / STEP for name in linears]
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in moved])


def distance(found: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(found - other) / np.linalg.norm(other))


def measure(policy) -> dict[str, list[float]]:
    """Distances by name, one for each batch."""
    found: dict[str, list[float]] = {}
    mesh = make_mesh(MeshConfig())
    for number in range(SETS):
        batch = batch_of(policy, number)
        whole = {recipe: gradient(policy, batch, recipe) for recipe in RECIPES_MEASURED}
        found.setdefault("quantization: jet-rl against bf16", []).append(
            distance(whole["jet-rl"], whole["bf16"])
        )
        for recipe, own in whole.items():
            for parts in (2, 4, 8):
                moved = distance(gradient(policy, batch, recipe, parts), own)
                found.setdefault(f"{recipe}: {parts} micro-batches against 1", []).append(moved)
            for columns in (8, 120):
                moved = distance(gradient(policy, padded(batch, columns), recipe), own)
                found.setdefault(f"{recipe}: {columns} columns of padding more", []).append(moved)
            aligned = padded(batch, 128 - NEW, 128 - WIDTH)
            with jax.set_mesh(mesh):
                packed = [
                    narrow(batch, TrainerConfig(packing=True), parts, mesh).batch
                    for parts in (1, 4)
                ]
            for name, (one, other) in {
                "packed": packed,
                "whole groups": (aligned, aligned),
            }.items():
                moved = distance(gradient(policy, other, recipe, 4), gradient(policy, one, recipe))
                found.setdefault(f"{recipe}: {name}, 4 micro-batches against 1", []).append(moved)
    return {name: [float(f"{x:.4g}") for x in values] for name, values in found.items()}


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("gradients", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Measure, write and print."""
    behaviour = measured(RECIPES_MEASURED, ["bfloat16"])
    found = measure(load_policy(arguments.model, jnp.float32))
    path = Path(arguments.output)
    made = facts("experiments.gradients")
    write(path, {"distances": found, "made": made, "behaviour": behaviour})
    for name, values in found.items():
        print(f"{np.mean(values):.2e}  ({min(values):.1e} to {max(values):.1e})  {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

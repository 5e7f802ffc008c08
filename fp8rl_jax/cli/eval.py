"""`fp8rl eval RUN.toml --model.path DIR`: held-out accuracy of a model under a recipe's rollout formats."""

from __future__ import annotations

import json

from fp8rl_jax.config.run import RunConfig

Arguments = RunConfig


def run(config: RunConfig) -> None:
    """Prints one JSON object: accuracy (avg@k), its 95 % interval, pass@k where evaluation.samples is above 1."""
    from fp8rl_jax.cli.start import start_jax

    start_jax()
    import jax

    from fp8rl_jax.tasks.workers import RewardPool
    from fp8rl_jax.training.evaluate import evaluate_held_out
    from fp8rl_jax.training.setup import build

    setup = build(config, sampled=False)
    with jax.set_mesh(setup.mesh), RewardPool(config.task) as pool:
        metrics = evaluate_held_out(setup, pool)
    examples = min(config.evaluation.examples, len(setup.held_out))
    print(json.dumps({"recipe": config.recipe, "examples": examples, **metrics}))

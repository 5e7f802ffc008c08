"""`fp8rl eval RUN.toml --model.path DIR`: held-out accuracy of a model under a recipe's rollout
formats."""

from __future__ import annotations

import json
import sys

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError

Arguments = RunConfig


def run(config: RunConfig) -> None:
    """Prints one JSON object: accuracy (avg@k), its 95 % interval, pass@k where evaluation.samples
    is above 1.

    Raises:
        UserError: nothing is held out, or every reward failed.
    """
    if config.task.eval_size == 0:
        raise UserError("task.eval_size = 0 holds out no problem to evaluate on; raise it")
    from fp8rl_jax.cli.start import start_jax

    start_jax()
    from fp8rl_jax.training.evaluate import evaluate_held_out
    from fp8rl_jax.training.setup import announce, build, reward_log, reward_pool

    setup = build(config, sampled=False)
    announce(setup, lambda line: print(line, file=sys.stderr))
    with reward_pool(setup) as pool:
        metrics = evaluate_held_out(setup, pool)
    examples = min(config.evaluation.examples, len(setup.held_out))
    if metrics["eval/failed_rewards"] == examples * config.evaluation.samples:
        raise UserError(
            "every reward failed, so there is no accuracy; what rewards print is in "
            f"{reward_log(setup)}"
        )
    print(
        json.dumps(
            {
                "recipe": config.recipe,
                "compute_dtype": config.compute_dtype,
                "examples": examples,
                **metrics,
            }
        )
    )

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

    from fp8rl_jax.rollout.calibration import calibrate_on_prompts
    from fp8rl_jax.tasks.workers import RewardPool
    from fp8rl_jax.training.evaluate import evaluate, evaluation_sampling
    from fp8rl_jax.training.setup import build

    setup = build(config, sampled=False)
    examples = setup.held_out.examples[: config.evaluation.examples]
    with jax.set_mesh(setup.mesh), RewardPool(config.task) as pool:
        engine = setup.engine()
        prompts = setup.encoder.batch(examples[: config.evaluation.batch_size])
        engine.sync(setup.policy, calibrate_on_prompts(setup.policy, prompts, setup.recipe, engine.dtype))
        sampling = evaluation_sampling(config.evaluation, setup.sampling)
        key = jax.random.key(config.seed)
        metrics, _ = evaluate(engine, setup.encoder, pool, examples, config.evaluation, sampling, key)
    print(json.dumps({"recipe": config.recipe, "examples": len(examples), **metrics}))

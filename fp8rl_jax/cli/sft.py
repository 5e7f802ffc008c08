"""`fp8rl sft RUN.toml ...`: supervised training on the task's answers."""

from __future__ import annotations

from dataclasses import replace

from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.run import RunConfig

Arguments = RunConfig


def run(config: RunConfig) -> None:
    """Trains the built-in policy from random weights, or the model of model.path where
    sft.from_scratch is off."""
    from fp8rl_jax.cli.start import start_jax

    start_jax()
    from fp8rl_jax.training.setup import announce, build, describe
    from fp8rl_jax.training.sft import supervise

    if config.sft.from_scratch:
        config = replace(config, model=replace(config.model, path=""))
    config = replace(config, output=config.sft.output or config.output)
    setup = build(config, sampled=False)
    if config.dry_run:
        print(dump_toml(config))
        announce(setup, print, "sft.batch_size")
        print(describe(setup))
        return
    supervise(setup)

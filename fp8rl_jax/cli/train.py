"""`fp8rl train RUN.toml ...`: reinforcement learning."""

from __future__ import annotations

from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.run import RunConfig

Arguments = RunConfig


def run(config: RunConfig) -> None:
    """Trains, or with `--dry-run` prints the resolved configuration, parameter counts and the
    memory plan."""
    from fp8rl_jax.cli.start import start_jax

    start_jax()
    from fp8rl_jax.training.loop import train
    from fp8rl_jax.training.setup import announce, build, describe

    setup = build(config)
    if config.dry_run:
        print(dump_toml(config))
        announce(setup, print, "rollout.prompts_per_step")
        print(describe(setup))
        return
    train(setup)

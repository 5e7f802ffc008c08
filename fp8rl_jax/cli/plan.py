"""`fp8rl plan RUN.toml ...`: what a run needs of a device's memory, from the model's config.json
alone."""

from __future__ import annotations

from fp8rl_jax.config.run import RunConfig

Arguments = RunConfig


def run(config: RunConfig) -> int:
    """Prints the plan; returns 1 where it is known not to fit. Axes of the mesh that are -1 count
    as 1."""
    from fp8rl_jax.cli.start import start_jax

    start_jax()
    from fp8rl_jax.training.fitting import report
    from fp8rl_jax.training.plan import mesh_sizes
    from fp8rl_jax.training.setup import model_shape

    text, fits = report(model_shape(config), config, mesh_sizes(config.mesh))
    print(text)
    return 0 if fits else 1

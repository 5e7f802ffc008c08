"""QeRL's adaptive quantization noise (arXiv 2510.11696): the served policy explores by noise on its
norms, less of it from stage to stage.

    rollout.transform = "fp8rl_jax.rollout.noise:on_norms"
    rollout.transform_args = { start = 1e-2, end = 1e-4, stages = 10 }

A run is divided into stages. In the first one only quantization itself is noise; in stage i >= 1
each weight of the RMSNorms in front of a layer's linears, and of the last one, has N(0, sigma_i^2)
added, drawn anew at each sync:

    sigma_i = start * (end / start)^((i - 1) / (stages - 2))

Noise z on a norm's weight w multiplies the columns of the linears behind it by 1 + z / w, so it is
noise on these linears that costs nothing to serve. Trainer and masters have none: the rollout's
log-probabilities are those of the policy that sampled, and a correction sees the difference. As in
the official code (NVlabs/QeRL at e8c6e79), whose noise of a sync adds to that of the ones before
unless the norms are trained, too; here every sync begins from the masters. Norms of queries and
keys, which the models there have not, stay as they are. experiments/recipes/qerl.toml has the rest
of the method.
"""

from __future__ import annotations

from itertools import count

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy, changed_policy
from fp8rl_jax.rollout.sync import TRANSFORM_KEY, SyncContext


def on_norms(
    policy: Policy,
    context: SyncContext,
    *,
    start: float = 1e-2,
    end: float = 1e-4,
    stages: float = 10,
) -> Policy:
    """Add the noise of the step's stage, for rollout.transform.

    Args:
        policy: that is served.
        context: with a key, the step and the number of steps.
        start, end: sigma of the first and of the last stage that has noise.
        stages: of the run, the one without noise included.

    Raises:
        UserError: a sigma that is not above 0, or stages that are no whole number of at least 3.
    """
    key = f"{TRANSFORM_KEY}_args"
    for name, value in (("start", start), ("end", end)):
        if value <= 0:
            raise UserError(f"{key}: {name} = {value:g} must be above 0")
    if stages < 3 or stages != int(stages):
        raise UserError(f"{key}: stages = {stages:g} must be a whole number, at least 3")
    if context.key is None:
        raise UserError(f"{TRANSFORM_KEY}: noise is drawn with the key of a sync, which has none")
    sigma = level(context.step, context.steps, start, end, int(stages))
    draws, number = context.key, count()

    def noisy(x):
        draw = jax.random.normal(jax.random.fold_in(draws, next(number)), x.shape)
        return x + (sigma * draw).astype(x.dtype)

    def noisy_in_layers(path, x):
        return noisy(x) if "layernorm" in jax.tree_util.keystr(path) else x

    return changed_policy(
        policy,
        layers=jax.tree_util.tree_map_with_path(noisy_in_layers, policy.layers),
        norm=jax.tree.map(noisy, policy.norm),
    )


def level(
    step: int | Int[Array, ""],
    steps: int | Int[Array, ""],
    start: float,
    end: float,
    stages: int,
) -> Float[Array, ""]:
    """Compute sigma of a step; 0 in the first stage, and where the number of steps is 0.

    Args:
        step: updates so far.
        steps: of the run; behind them the last stage goes on.
        start, end, stages: as in `on_norms`.
    """
    step, steps = jnp.asarray(step), jnp.asarray(steps)
    stage = jnp.minimum(step * stages // jnp.maximum(steps, 1), stages - 1)
    sigma = start * (end / start) ** ((stage - 1) / (stages - 2))
    return jnp.where((stage > 0) & (steps > 0), sigma, 0.0).astype(jnp.float32)

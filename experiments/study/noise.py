"""The study's positive control: an error of the rollout that is no rounding.

Each weight of a served linear is off by a draw of its own, anew at every sync, which no input has
anything to do with; at a level that gives the k3 of a dose it is that dose without its kind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy, changed_policy
from fp8rl_jax.rollout.sync import TRANSFORM_KEY, SyncContext


def noise(policy: Policy, context: SyncContext, *, relative: float) -> Policy:
    """Add N(0, (relative * rms of its matrix)^2) to each weight of the linears, for
    `rollout.transform`.

    Raises:
        UserError: the sync has no key to draw with.
    """
    if context.key is None:
        raise UserError(f"{TRANSFORM_KEY}: noise is drawn with the key of a sync, which has none")
    key = jax.random.fold_in(context.key, 1)

    def noisy(path: tuple, x: Array) -> Array:
        name = jax.tree_util.keystr(path)
        if "proj" not in name:
            return x
        rms = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, (-2, -1), keepdims=True))
        # a name's own draws, the same in every process
        draw = jax.random.fold_in(key, sum(31**i * ord(c) for i, c in enumerate(name)) % 2**31)
        return x + (relative * rms * jax.random.normal(draw, x.shape)).astype(x.dtype)

    return changed_policy(policy, layers=jax.tree_util.tree_map_with_path(noisy, policy.layers))

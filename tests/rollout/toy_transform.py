"""Transforms of what is served, as anyone would write them."""

from __future__ import annotations

import jax

from fp8rl_jax.models.policy import with_layers


def noisy_norms(policy, context, *, sigma, decay=1.0):
    """Noise on the norms in front of a layer's linears, less of it with every step."""
    scale = sigma * decay**context.step

    def noisy(path, x):
        if "layernorm" not in jax.tree_util.keystr(path):
            return x
        return x + scale * jax.random.normal(jax.random.fold_in(context.key, x.size), x.shape)

    return with_layers(policy, jax.tree_util.tree_map_with_path(noisy, policy.layers))


def nothing(policy, context):
    return policy


def other_dtype(policy, context):
    return jax.tree.map(lambda x: x.astype("float16"), policy)


def no_policy(policy, context):
    return 7


def broken(policy, context):
    raise ValueError("out of noise")

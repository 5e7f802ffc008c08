"""Sharpness of the loss in a sequence's last logits, after arXiv 2405.18710.

How far the cross-entropy of the last token rises at most where its logits z are moved within a box
(Keskar et al., arXiv 1609.04836, of which it is the special case):

    100 (max f(z + d) - f(z)) / (1 + f(z))     |d_i| <= e (|z_i| + 1)

A larger number means a loss that changes fast beside where training stands. The maximum is in
closed form: cross-entropy falls with the logit of the target y and rises with every other one, so
it is at that corner of the box where the first is least and all others are greatest. With p the
softmax of z it has risen by

    log(1 + sum over i != y of p_i (exp(e (|z_i| + |z_y| + 2)) - 1))

which subtracts nothing. Which e and which box that paper has, we could not read; the definition
above is ours, and e is swept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.rl.metrics import Mask, Mean, Metrics

EPSILONS = (5e-4, 1e-3, 1e-2)
"""Those of Keskar et al., and one that shows more."""


def sharpness(
    logits: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"], epsilon: float
) -> Float[Array, "*batch"]:
    """Compute the sharpness of each row's cross-entropy, float32, in percent.

    Args:
        logits: of the last token, at the loss's temperature.
        targets: that token.
        epsilon: relative half width of the box.
    """
    logits = logits.astype(jnp.float32)
    chosen = targets[..., None] == lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    logprobs, room = jax.nn.log_softmax(logits), epsilon * (jnp.abs(logits) + 1)

    def of_target(x: Array) -> Array:
        return jnp.sum(jnp.where(chosen, x, 0.0), axis=-1, keepdims=True)

    rises = jnp.exp(logprobs) * jnp.expm1(room + of_target(room))
    rise = jnp.log1p(jnp.sum(jnp.where(chosen, 0.0, rises), axis=-1))
    return 100 * rise / (1 - of_target(logprobs)[..., 0])


def sharpness_metrics(
    logits: Float[Array, "b vocab"], targets: Int[Array, " b"], mask: Mask
) -> Metrics:
    """Average over sequences, for each of EPSILONS: `sharpness/0.001` and others.

    Args:
        mask: [b], the sequences that have a token.
    """
    return {
        f"sharpness/{epsilon:g}": Mean.of(sharpness(logits, targets, epsilon), mask)
        for epsilon in EPSILONS
    }

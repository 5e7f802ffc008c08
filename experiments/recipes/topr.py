"""TOPR as an objective of one's own: docs/objectives.md."""

import jax
import jax.numpy as jnp


def topr(inputs, config, *, most=1.0):
    """TOPR (arXiv 2503.14286), token by token: REINFORCE where A >= 0, and where A < 0 weighted by
    r, at most `most`.

    What the policy has already unlearned stops pushing, and what is good is learned however
    unlikely it has become. Departs from the paper, whose ratio is that of the whole completion to
    the policy that sampled it.
    """
    bad = inputs.advantages < 0
    weight = jax.lax.stop_gradient(jnp.where(bad, jnp.minimum(inputs.ratio, most), 1.0))
    return -weight * inputs.advantages * inputs.logprobs, {
        "objective/tapered": bad & (inputs.ratio > most)
    }

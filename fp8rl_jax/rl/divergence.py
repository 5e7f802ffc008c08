"""Estimates of KL(pi_theta || pi_ref) as a term of the loss: three values, three gradients.

With x = log pi_ref - log pi_theta of a token that pi_theta sampled (J. Schulman, http://joschu.net/blog/kl-approx.html):

    k1   -x                unbiased, of either sign
    k2   x^2 / 2           biased, never negative
    k3   exp(x) - 1 - x    unbiased, never negative; GRPO's, arXiv 2402.03300

A good value does not make a good gradient (arXiv 2506.09477): the derivative of k1 is that of log pi_theta and averages to
0; k3's is that of the reverse KL divergence; k2's is right. So the gradient is a choice of its own:

    estimator   the derivative of the formula
    k2          the value of the formula, the derivative of k2                verl's "k1+" and "k3+"
    score       the derivative of sg(1 / pi_theta) pi_theta * formula         NeMo RL: the score-function term is in it
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.rl import LossConfig
from fp8rl_jax.rl.masked import LOG_RATIO_LIMIT, Mask, clamp_log_ratio, k3


def kl_penalty(
    logprobs: Float[Array, "B T"], reference_logprobs: Float[Array, "B T"], mask: Mask, config: LossConfig
) -> Float[Array, "B T"]:
    """The estimate of each token, in nats; 0 in the padding.

    x is clamped to +-20; a token beyond that has no gradient. Departs from verl and NeMo RL, which also cap the result of
    k3 (NeMo RL: of all three) at +-10, and from verl, whose k1 and k2 do not clamp x.

    Args:
        logprobs: under the policy that is trained; padding may hold anything.
        reference_logprobs: constants.
        mask: the tokens in the loss.
        config: kl_estimator, kl_gradient.
    """
    own = jnp.where(mask.astype(bool), logprobs, 0.0)
    raw = jax.lax.stop_gradient(jnp.where(mask.astype(bool), reference_logprobs, 0.0)) - own
    x = clamp_log_ratio(raw)
    match config.kl_estimator:
        case "k1":
            value = -x
        case "k2":
            value = 0.5 * x**2
        case _:
            value = k3(x)
    match config.kl_gradient:
        case "estimator":
            return value
        case "k2":
            square = 0.5 * x**2
            return jax.lax.stop_gradient(value - square) + square
        case _:
            score = jnp.where(jnp.abs(raw) <= LOG_RATIO_LIMIT, own - jax.lax.stop_gradient(own), 0.0)
            return jnp.exp(score) * value

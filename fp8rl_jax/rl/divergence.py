"""Estimates of KL(pi_theta || pi_ref): as a term of the loss, three values and three gradients; and
as a part of the reward.

With x = log pi_ref - log pi_theta of a token that pi_theta sampled (J. Schulman,
http://joschu.net/blog/kl-approx.html):

    k1   -x                unbiased, of either sign
    k2   x^2 / 2           biased, never negative
    k3   exp(x) - 1 - x    unbiased, never negative; GRPO's, arXiv 2402.03300

A good value does not make a good gradient (arXiv 2506.09477): the derivative of k1 is that of log
pi_theta and averages to 0; k3's is that of the reverse KL divergence; k2's is right. So the
gradient is a choice of its own:

    estimator   the derivative of the formula
    k2          the value of the formula, the derivative of k2                verl's "k1+" and "k3+"
    score       the derivative of sg(1 / pi_theta) pi_theta * formula         NeMo RL: the
                score-function term is in it

In the reward (InstructGPT, arXiv 2203.02155) it is a constant and needs no gradient: r - beta *
sum_t KL_t, with the old policy in place of pi_theta. The policy gradient then brings the
score-function term, and k1 is the unbiased choice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.rl import KLEstimator, LossConfig, RewardKLConfig
from fp8rl_jax.rl.masked import LOG_RATIO_LIMIT, Mask, check_shapes, clamp_log_ratio, k3, masked_sum


def kl_penalty(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    mask: Mask,
    config: LossConfig,
) -> Float[Array, "B T"]:
    """The estimate of each token, in nats; 0 in the padding.

    x is clamped to +-20; a token beyond that has no gradient. Departs from verl and NeMo RL, which
    also cap the result of k3 (NeMo RL: of all three) at +-10, and from verl, whose k1 and k2 do not
    clamp x.

    Args:
        logprobs: under the policy that is trained; padding may hold anything.
        reference_logprobs: constants.
        mask: the tokens in the loss.
        config: kl_estimator, kl_gradient.
    """
    own = jnp.where(mask.astype(bool), logprobs, 0.0)
    raw = jax.lax.stop_gradient(jnp.where(mask.astype(bool), reference_logprobs, 0.0)) - own
    x = clamp_log_ratio(raw)
    value = _estimate(x, config.kl_estimator)
    match config.kl_gradient:
        case "estimator":
            return value
        case "k2":
            square = 0.5 * x**2
            return jax.lax.stop_gradient(value - square) + square
        case _:
            score = jnp.where(
                jnp.abs(raw) <= LOG_RATIO_LIMIT, own - jax.lax.stop_gradient(own), 0.0
            )
            return jnp.exp(score) * value


def reward_kl(
    old_logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    mask: Mask,
    config: RewardKLConfig,
) -> Float[Array, " B"]:
    """The estimate of KL(old || reference) of each completion, in nats: the sum over its tokens,
    which the reward loses config.coefficient times.

    verl's apply_kl_penalty and InstructGPT take it from the reward of each token, which a value
    network turns into advantages token by token. Without one a completion has a single reward,
    hence the sum; it is what verl's GRPO makes of it, too. Departs from both in clamping x to +-20,
    and from verl in a coefficient that stays as it is (no adaptive controller).

    Args:
        old_logprobs: the trainer's, of the policy that sampled; padding may hold anything.
        reference_logprobs: of the same tokens at the same temperature.
        mask: sampled tokens.
        config: estimator.
    """
    check_shapes(mask, old_logprobs=old_logprobs, reference_logprobs=reference_logprobs)
    return masked_sum(
        _estimate(clamp_log_ratio(reference_logprobs - old_logprobs), config.estimator),
        mask,
        axis=1,
    )


def _estimate(x: Float[Array, "B T"], estimator: KLEstimator) -> Float[Array, "B T"]:
    match estimator:
        case "k1":
            return -x
        case "k2":
            return 0.5 * x**2
        case _:
            return k3(x)

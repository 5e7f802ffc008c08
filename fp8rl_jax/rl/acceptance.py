"""Whether the policy that is served keeps what an update promised: step 2 of MIPU (arXiv
2606.29526).

An update is made of the trainer's policy pi, and what samples, and is deployed in the end, is
another one, mu. What mu gains from update k is a sum of three:

    J(mu_k+1) - J(mu_k) = J(mu_k+1) - J(pi_k+1)    the inference gap behind the update
                        + J(pi_k+1) - J(pi_k)      what the trainer's policy gains
                        + J(pi_k) - J(mu_k)        the inference gap before it

A truncated importance weight (rl.correction "token_tis", MIPU's step 1) takes the last two
together. Of the first the paper estimates a proxy, from completions that mu_k+1 samples:

    T = -mean(rho_i A_i)    rho_i = exp(mean over the completion's tokens of log pi - log mu)

with A_i its advantage within the completions of its prompt. T is negative where the trainer's
policy likes good completions better than the served one does, or bad ones less: what the update
gained is then not what is served. The update is accepted where T >= -c, else masters, optimizer and
served policy go back to what they were. It is a sign of risk, and no proof that mu became worse;
and nothing is scaled: an update is taken whole or not at all. The tolerance c falls linearly over
the first steps, as T is low at first.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.rl.metrics import Mask, check_shapes, clamp_log_ratio, masked_mean


def inference_gap(
    rollout_logprobs: Float[Array, "B T"],
    train_logprobs: Float[Array, "B T"],
    mask: Mask,
    advantages: Float[Array, " B"],
    valid: Bool[Array, " B"],
) -> Float[Array, ""]:
    """Compute T of a batch: MIPU's proxy of what the served policy earns above the trainer's.

    Departs from the paper in a mean of log-ratios that is clamped to +-20.

    Args:
        rollout_logprobs, train_logprobs: of the sampled tokens, at one temperature, float32, under
            the policy that sampled them and the trainer's of the same weights.
        mask: completion tokens; padding may hold anything.
        advantages: of each completion.
        valid: completions that have a reward; the others are left out.
    """
    check_shapes(mask, rollout_logprobs=rollout_logprobs, train_logprobs=train_logprobs)
    mean = masked_mean(train_logprobs - rollout_logprobs, mask, axis=1)
    return -masked_mean(jnp.exp(clamp_log_ratio(mean)) * advantages, valid)

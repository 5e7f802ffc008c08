"""What one token adds to the policy loss, and how far the policy has moved from pi_old at it.

With r = pi_theta / pi_old and advantage A:

    clip        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))    PPO, arXiv 1707.06347;
                clip_high alone raised is
                DAPO's clip-higher, arXiv 2503.14476; at most dual_clip * |A| where A < 0, arXiv
                1912.09729; calibrated bounds in place of these two, calibrated_clipping.py
    cispo       -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta    CISPO (MiniMax-M1),
                arXiv 2506.13585: every token
                keeps its gradient, with a bounded weight. The paper has no lower bound: clip_low =
                1
    reinforce   -A log pi_theta    Williams 1992; RLOO and REINFORCE++ without their ratio

Any other is a function of one's own with the same signature (docs/objectives.md), `rl.objective =
"module:function"`:

    objective(inputs: TokenInputs, config: LossConfig, **arguments)
        -> losses [B, T], or (losses, {metric: values [B, T]})

GSPO (arXiv 2507.18071) clips once a sequence: r is exp(mean over its tokens of log pi_theta /
pi_old), in the form of its section on token-level advantages: the value is the sequence's, the
gradient each token's own. With one advantage and one weight a sequence, and aggregation
"sequence_mean", it is the sequence's ratio and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from fp8rl_jax.config.rl import LossConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.functions import call, floats, is_array, shown
from fp8rl_jax.rl.masked import Mask, clamp_log_ratio, masked_mean

KEY = "rl.objective"
METRIC_PREFIXES = ("objective/", "clip_ratio/")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenInputs:
    """What an objective computes from: the tokens of one micro-batch, B completions of T tokens.

    Arrays are [B, T], numbers float32. `logprobs` and `ratio` carry the gradient; all others are
    constants. The padding holds 0 where it says nothing else.
    """

    logprobs: Float[Array, "B T"]
    """log pi_theta of each sampled token."""
    old_logprobs: Float[Array, "B T"]
    """log pi_old, the policy at the start of the update."""
    ratio: Float[Array, "B T"]
    """r of each token as rl.ratio says, from log-ratios clamped to +-20; 1 in the padding."""
    advantages: Float[Array, "B T"]
    """A of each token; the padding of a completion has it, too."""
    mask: Bool[Array, "B T"]
    """The tokens in the loss."""
    weights: Float[Array, "B T"]
    """Importance weights, by which the objective's losses are multiplied afterwards; 1 everywhere
    without a correction."""
    bounds: tuple[float | Float[Array, ""], float | Float[Array, ""]]
    """Bounds of r: 1 - clip_low and 1 + clip_high, or those of calibrated clipping."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy of each token's distribution in nats, if it was given; in a run it is."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """Under the reference policy, if it was given; in a run it is where a KL coefficient is above
    0."""


Losses = Float[Array, "B T"]
Objective = Callable[..., Losses | tuple[Losses, dict[str, Shaped[Array, "B T"]]]]
"""(inputs, config, **arguments) -> the loss of each token before weights; and what is measured,
averaged over the tokens in the loss."""


def clip(inputs: TokenInputs, config: LossConfig) -> tuple[Losses, dict[str, Bool[Array, "B T"]]]:
    """PPO's clipped surrogate; measures where clipping takes the gradient: below with A < 0, above
    with A > 0."""
    ratio, advantages, (low, high) = inputs.ratio, inputs.advantages, inputs.bounds
    losses = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, low, high))
    metrics = _clipped((advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high))
    if config.dual_clip is not None:
        losses = jnp.where(
            advantages < 0, jnp.minimum(losses, -advantages * config.dual_clip), losses
        )
        metrics["clip_ratio/dual_mean"] = (advantages < 0) & (ratio > config.dual_clip)
    return losses, metrics


def cispo(inputs: TokenInputs, config: LossConfig) -> tuple[Losses, dict[str, Bool[Array, "B T"]]]:
    """REINFORCE weighted by the clipped ratio; measures where the weight is bounded, with any A."""
    weight = jax.lax.stop_gradient(jnp.clip(inputs.ratio, *inputs.bounds))
    low, high = inputs.bounds
    return -inputs.advantages * weight * inputs.logprobs, _clipped(
        inputs.ratio < low, inputs.ratio > high
    )


def reinforce(
    inputs: TokenInputs, config: LossConfig
) -> tuple[Losses, dict[str, Bool[Array, "B T"]]]:
    """REINFORCE, which clips nothing."""
    nowhere = jnp.zeros_like(inputs.mask)
    return -inputs.advantages * inputs.logprobs, _clipped(nowhere, nowhere)


BUILT_IN: dict[str, Objective] = {"clip": clip, "cispo": cispo, "reinforce": reinforce}


def token_losses(
    inputs: TokenInputs, config: LossConfig
) -> tuple[Losses, dict[str, Shaped[Array, "B T"]]]:
    """The losses of `config.objective`, before weights, and what it measures.

    Args:
        inputs: tokens.
        config: objective, objective_args, and what the objective reads.

    Raises:
        UserError: the objective is a function that does not import, does not take (inputs, config,
            **objective_args), raises an exception, or returns something else than it should.
    """
    returned = call(KEY, config.objective, BUILT_IN, inputs, config, config.objective_args)
    losses, metrics = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    )
    shape = inputs.mask.shape
    losses = floats(KEY, config.objective, losses, shape, "[B, T]")
    what = f"{KEY} = {config.objective!r}"
    if not isinstance(metrics, dict):
        raise UserError(
            f"{what} must return its metrics as a dictionary, and returned {shown(metrics)}"
        )
    for name, values in metrics.items():
        if not (isinstance(name, str) and name.startswith(METRIC_PREFIXES)):
            raise UserError(
                f"{what}: the name of metric {name!r} must begin with "
                f"{' or '.join(METRIC_PREFIXES)}"
            )
        if not is_array(values, shape):
            raise UserError(
                f"{what} must return {name} of each token [B, T], here {list(shape)}, and "
                f"returned {shown(values)}"
            )
    return losses, {name: jnp.asarray(values) for name, values in metrics.items()}


def policy_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Mask, level: str
) -> Float[Array, "B T"]:
    """r of each token, from log-ratios clamped to +-20; 1 in the padding.

    Departs from verl's GSPO, whose log-ratio is at most 10, and from NeMo RL's, which is not
    clamped and whose gradient goes through the mean: another gradient only where advantages or
    weights differ within a sequence.

    Args:
        logprobs: under the policy that is trained; padding may hold anything.
        old_logprobs: constants.
        mask: the tokens in the loss; the mean of a sequence is over them.
        level: "token" or "sequence".
    """
    mask = mask.astype(bool)
    logprobs = jnp.where(mask, logprobs, 0.0)
    log_ratio = logprobs - jax.lax.stop_gradient(jnp.where(mask, old_logprobs, 0.0))
    if level == "sequence":
        own = logprobs - jax.lax.stop_gradient(logprobs)
        log_ratio = own + jax.lax.stop_gradient(masked_mean(log_ratio, mask, axis=1))[:, None]
    return jnp.where(mask, jnp.exp(clamp_log_ratio(log_ratio)), 1.0)


def _clipped(low: Bool[Array, "B T"], high: Bool[Array, "B T"]) -> dict[str, Bool[Array, "B T"]]:
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }

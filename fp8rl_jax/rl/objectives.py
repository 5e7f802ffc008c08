"""What one token adds to the policy loss: objectives, the ratio and its bounds, KL estimates.

With r = pi_theta / pi_old and advantage A:

    clip        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)): PPO, arXiv 1707.06347. clip_high
                alone raised is DAPO's clip-higher, arXiv 2503.14476; at most dual_clip * |A| where
                A < 0, arXiv 1912.09729; calibrated bounds may replace these two (below)
    cispo       -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta: CISPO (MiniMax-M1), arXiv
                2506.13585. Every token keeps its gradient, with a bounded weight. The paper has no
                lower bound: clip_low = 1
    reinforce   -A log pi_theta: Williams 1992; RLOO and REINFORCE++ without their ratio
    p3o         -sg(min(r, E)) A log pi_theta + (1 - E) KL(pi_theta || pi_old): P3O, arXiv
                2605.12380. E = (sum r)^2 / (n sum r^2) of the batch's n tokens is the effective
                part of the sample, 1 where all r are 1: what the batch says of itself takes the
                place of clip_low and clip_high. pi_old is the policy that sampled, so it needs
                correction mode "bypass"; and E is of the whole update, so it does not go with
                micro-batches. By the authors' code (FeynRL-project/FeynRL commit 4f7eafe0,
                algs/P3O/p3o.py), which takes E of each micro-batch

Any other is a function of one's own with the same signature (docs/objectives.md), `rl.objective =
"module:function"`:

    objective(inputs: TokenInputs, config: LossConfig, **arguments)
        -> losses [B, T], or (losses, {metric: values [B, T]})

GSPO (arXiv 2507.18071) clips whole sequences: r is exp(mean over its tokens of log pi_theta /
pi_old), in the form of its section on token-level advantages: the value is the sequence's, the
gradient each token's own. With one advantage and one weight a sequence, and aggregation
"sequence_mean", it is the sequence's ratio and its gradient.

Calibrated clipping (arXiv 2609.22870) finds bounds that clip as much of a noisy ratio as PPO's clip
of the unquantized one. A trainer in FP8 computes log pi_theta and log pi_old each with its own
rounding, so r carries the noise of both. The distribution of r widens, and clipping is one-sided: a
token with A < 0 that noise moves below 1 - clip_low loses its whole gradient, and with it the
penalty that it should have had. Bad tokens then go unpunished, and the entropy rises. The remedy
compares the ratios of one batch with those of a forward in which nothing is quantized, r':

    lower bound L    the same part of the tokens with A < 0 is clipped:
                     F(L) = F'(1 - clip_low), F their distribution of r
    upper bound H    the same balance of updates, after that part is fixed:
                     P(H) / N(L) = P'(1 + clip_high) / N'(1 - clip_low)
                     P(h) = sum of A r over A > 0, r <= h
                     N(l) = sum of |A| r over A < 0, r >= l

A looser L alone punishes too much, which is why H has to follow. The paper itself could not be
read: the quantile rule, the balance, 20 steps between calibrations, its two passes and its starting
bounds are from accounts of it that agree. That a token's contribution is its weight in the
gradient, |A| r and 0 where it is clipped, is how "effective update" is read here. Departures: where
r' clips no token of a sign, the batch does not say how far that bound may be tightened, and it is
not; and bounds stay within [lowest, highest]. Sequence ratios and other objectives are not in the
paper and are refused.

KL(pi_theta || pi_ref) is estimated as a term of the loss, or as a part of the reward. With
x = log pi_ref - log pi_theta of a token that pi_theta sampled (J. Schulman,
http://joschu.net/blog/kl-approx.html):

    k1          -x: unbiased, of either sign
    k2          x^2 / 2: biased, never negative
    k3          exp(x) - 1 - x: unbiased, never negative; GRPO's, arXiv 2402.03300

A good value does not make a good gradient (arXiv 2506.09477): the derivative of k1 is that of
log pi_theta and averages to 0; k3's is that of the reverse KL divergence; k2's is right. So the
gradient is a choice of its own:

    estimator   the derivative of the formula
    k2          the value of the formula, the derivative of k2: verl's "k1+" and "k3+"
    score       the derivative of sg(1 / pi_theta) pi_theta * formula: NeMo RL, with the
                score-function term in it

In the reward (InstructGPT, arXiv 2203.02155) it is a constant and needs no gradient:
r - beta * sum_t KL_t, with the old policy in place of pi_theta. The policy gradient then brings the
score-function term, and k1 is the unbiased choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from fp8rl_jax.config.rl import KLEstimator, LossConfig, RewardKLConfig, RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.functions import call, floats, is_array, summarize
from fp8rl_jax.rl.metrics import (
    LOG_RATIO_LIMIT,
    Mask,
    check_shapes,
    clamp_log_ratio,
    k3,
    masked_count,
    masked_mean,
    masked_sum,
    safe_divide,
)

OBJECTIVE_KEY = "rl.objective"
_METRIC_PREFIXES = ("objective/", "clip_ratio/")


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
    """Bound the ratio pessimistically: PPO's clipped surrogate.

    Measures where clipping takes the gradient: below with A < 0, above with A > 0.
    """
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
    """Weigh REINFORCE by the clipped ratio: CISPO.

    Measures where the weight is bounded, with any A.
    """
    weight = jax.lax.stop_gradient(jnp.clip(inputs.ratio, *inputs.bounds))
    low, high = inputs.bounds
    return -inputs.advantages * weight * inputs.logprobs, _clipped(
        inputs.ratio < low, inputs.ratio > high
    )


def reinforce(
    inputs: TokenInputs, config: LossConfig
) -> tuple[Losses, dict[str, Bool[Array, "B T"]]]:
    """Take log-probabilities without a ratio: REINFORCE, which clips nothing."""
    nowhere = jnp.zeros_like(inputs.mask)
    return -inputs.advantages * inputs.logprobs, _clipped(nowhere, nowhere)


def p3o(inputs: TokenInputs, config: LossConfig) -> tuple[Losses, dict[str, Shaped[Array, "B T"]]]:
    """Weigh REINFORCE by the ratio up to the effective part of the sample, and pull the policy back
    to the one that sampled by what is missing of it: P3O.

    The divergence is log r + exp(-log r) - 1, with the exponent held in +-10 as in FeynRL: a token
    beyond that is pushed on by the first term, with a derivative of at most 1. Measures where the
    weight is cut, and the effective part as objective/ess. Departs from FeynRL in the log-ratio of
    r, which is clamped to +-20.
    """
    ratio, mask = jax.lax.stop_gradient(inputs.ratio), inputs.mask
    effective = safe_divide(
        masked_sum(ratio, mask) ** 2, masked_count(mask) * masked_sum(ratio**2, mask)
    )
    weight = jnp.minimum(ratio, effective)
    log_ratio = inputs.logprobs - inputs.old_logprobs
    divergence = log_ratio + jnp.expm1(jnp.clip(-log_ratio, -10.0, 10.0))
    losses = -weight * inputs.advantages * inputs.logprobs + (1 - effective) * divergence
    metrics: dict[str, Shaped[Array, "B T"]] = dict(
        _clipped(jnp.zeros_like(mask), ratio > effective)
    )
    return losses, metrics | {"objective/ess": jnp.broadcast_to(effective, mask.shape)}


BUILT_IN: dict[str, Objective] = {
    "clip": clip,
    "cispo": cispo,
    "reinforce": reinforce,
    "p3o": p3o,
}


def token_losses(
    inputs: TokenInputs, config: LossConfig
) -> tuple[Losses, dict[str, Shaped[Array, "B T"]]]:
    """Compute the losses of `config.objective`, before weights, and what it measures.

    Args:
        inputs: tokens.
        config: objective, objective_args, and what the objective reads.

    Raises:
        UserError: the objective is a function that does not import, does not take (inputs, config,
            **objective_args), raises an exception, or returns something else than it should.
    """
    returned = call(
        OBJECTIVE_KEY, config.objective, BUILT_IN, inputs, config, config.objective_args
    )
    losses, metrics = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    )
    shape = inputs.mask.shape
    losses = floats(OBJECTIVE_KEY, config.objective, losses, shape, "[B, T]")
    what = f"{OBJECTIVE_KEY} = {config.objective!r}"
    if not isinstance(metrics, dict):
        raise UserError(
            f"{what} must return its metrics as a dictionary, and returned {summarize(metrics)}"
        )
    for name, values in metrics.items():
        if not (isinstance(name, str) and name.startswith(_METRIC_PREFIXES)):
            raise UserError(
                f"{what}: the name of metric {name!r} must begin with "
                f"{' or '.join(_METRIC_PREFIXES)}"
            )
        if not is_array(values, shape):
            raise UserError(
                f"{what} must return {name} of each token [B, T], here {list(shape)}, and "
                f"returned {summarize(values)}"
            )
    return losses, {name: jnp.asarray(values) for name, values in metrics.items()}


def policy_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Mask, level: str
) -> Float[Array, "B T"]:
    """Compute r of each token, from log-ratios clamped to +-20; 1 in the padding.

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
        zero_with_gradient = logprobs - jax.lax.stop_gradient(logprobs)
        log_ratio = (
            zero_with_gradient
            + jax.lax.stop_gradient(masked_mean(log_ratio, mask, axis=1))[:, None]
        )
    return jnp.where(mask, jnp.exp(clamp_log_ratio(log_ratio)), 1.0)


def _clipped(low: Bool[Array, "B T"], high: Bool[Array, "B T"]) -> dict[str, Bool[Array, "B T"]]:
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }


def calibrated_bounds(
    ratio: Float[Array, "B T"],
    unquantized_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Mask,
    config: RLConfig,
) -> tuple[Float[Array, " bounds"], dict[str, Float[Array, ""]]]:
    """Compute the bounds (L, H) of `ratio` for calibrated clipping.

    Args:
        ratio: r of the trainer's own forward, as the loss clips it.
        unquantized_ratio: r' of the same tokens and weights, from forwards in which nothing is
            quantized.
        advantages: one a token; times the importance weights, where there are some.
        mask: the tokens in the loss; padding may hold anything.
        config: clip_low and clip_high, which say what is to be clipped of r'; clip_calibration's
            lowest and highest.

    Returns:
        bounds: float32 [2]: L, H.
        metrics: `clip_calibration/low_frac`, F'(1 - clip_low); `clip_calibration/balance`, the
            ratio of updates that H restores; `clip_calibration/false_low_frac`, the part of the
            tokens with A < 0 that r puts below 1 - clip_low and r' does not.
    """
    check_shapes(mask, ratio=ratio, unquantized_ratio=unquantized_ratio, advantages=advantages)
    mask, low, high = mask.astype(bool), 1 - config.clip_low, 1 + config.clip_high
    negative, positive = mask & (advantages < 0), mask & (advantages > 0)

    clipped = masked_sum(unquantized_ratio < low, negative)
    ordered = jnp.sort(jnp.where(negative, ratio, jnp.inf), axis=None)
    # the first that is kept; an infinity where none is left
    lower = ordered[clipped.astype(jnp.int32)]
    lower = jnp.where(clipped > 0, lower, jnp.minimum(lower, low))
    lower = jnp.where(jnp.isfinite(lower), lower, low)

    weight = jnp.abs(advantages) * ratio
    unquantized = jnp.abs(advantages) * unquantized_ratio
    balance = safe_divide(
        masked_sum(unquantized, positive & (unquantized_ratio <= high)),
        masked_sum(unquantized, negative & (unquantized_ratio >= low)),
    )
    wanted = balance * masked_sum(weight, negative & (ratio >= lower))
    order = jnp.argsort(jnp.where(positive, ratio, jnp.inf), axis=None)
    kept = jnp.cumsum(jnp.where(positive, weight, 0.0).reshape(-1)[order])
    count = masked_count(positive).astype(jnp.int32)
    # the last one where all are too little
    place = jnp.minimum(jnp.searchsorted(kept, wanted), jnp.maximum(count - 1, 0))
    upper = jnp.where(positive, ratio, jnp.inf).reshape(-1)[order][place]
    clips = masked_sum(unquantized_ratio > high, positive) > 0
    upper = jnp.where(clips, upper, jnp.maximum(upper, high))
    upper = jnp.where((count > 0) & (wanted > 0), upper, high)

    settings = config.clip_calibration
    bounds = jnp.stack([jnp.maximum(lower, settings.lowest), jnp.minimum(upper, settings.highest)])
    negatives = masked_count(negative)
    metrics = {
        "low_frac": safe_divide(clipped, negatives),
        "balance": balance,
        "false_low_frac": safe_divide(
            masked_sum((ratio < low) & (unquantized_ratio >= low), negative), negatives
        ),
    }
    return bounds, {f"clip_calibration/{name}": value for name, value in metrics.items()}


def kl_penalty(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    mask: Mask,
    config: LossConfig,
) -> Float[Array, "B T"]:
    """Estimate KL(pi_theta || pi_ref) of each token, in nats; 0 in the padding.

    x is clamped to +-20; a token beyond that has no gradient. Departs from verl and NeMo RL, which
    also cap the result of k3 (NeMo RL: of all three) at +-10, and from verl, whose k1 and k2 do not
    clamp x.

    Args:
        logprobs: under the policy that is trained; padding may hold anything.
        reference_logprobs: constants.
        mask: the tokens in the loss.
        config: kl_estimator, kl_gradient.
    """
    logprobs = jnp.where(mask.astype(bool), logprobs, 0.0)
    reference = jax.lax.stop_gradient(jnp.where(mask.astype(bool), reference_logprobs, 0.0))
    raw = reference - logprobs
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
                jnp.abs(raw) <= LOG_RATIO_LIMIT, logprobs - jax.lax.stop_gradient(logprobs), 0.0
            )
            return jnp.exp(score) * value


def reward_kl(
    old_logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    mask: Mask,
    config: RewardKLConfig,
) -> Float[Array, " B"]:
    """Estimate KL(old || reference) of each completion, in nats: the sum over its tokens.

    The reward loses config.coefficient times that.

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

"""The policy loss of GRPO and its relatives, in a form that adds up over micro-batches.

For a token with advantage A, sampled under pi_old, let r = pi_theta / pi_old. Its loss is

    objective(r, A)                              objectives.py; PPO's clip:
                                                 max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    times w                                      correction.py, constant, after the clipping
    plus kl_coefficient * KL(pi_theta || pi_ref)    not weighted by w
    minus entropy_coefficient * entropy

PPO's maximum is pessimistic: clipping takes away the reward for moving r further, never the penalty
for having moved it the wrong way. At r = 1 the clip is inactive and the gradient is the policy
gradient -A grad log pi_theta. That is all that happens where one update follows each rollout:
pi_old is the current policy, r is 1 by definition, and no forward pass is needed for log pi_old;
stop_gradient(log pi_theta) has the right value, and r keeps the right gradient.

The loss is a sum over the tokens at hand divided by a denominator of the *global* batch, which the
caller knows and a micro-batch does not. So losses and gradients of micro-batches are added, not
averaged, and equal the big batch's. `aggregation` says what is summed and divided by:

    token_mean      sum over tokens / tokens: a long completion weighs more. DAPO, arXiv 2503.14476
    sequence_mean   sum over completions of token means / completions: each weighs the same, and a
                    token of a long one less. GRPO, arXiv 2402.03300
    sequence_sum    sum over tokens / completions: the policy gradient of whole completions, RLOO's
    fixed_length    sum over tokens / (completions * length): as before at another scale. Dr. GRPO,
                    arXiv 2503.20783
    token_sum       sum over tokens, divided by nothing: verl's token-sum. The loss grows with the
                    batch

A completion counts while it has a token in the mask. Departs from verl in that: there, completions
that rejection has emptied still count in the three sequence modes, where the trainer gives the size
of the global batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from fp8rl_jax.config.rl import LossConfig, RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import check_unchanged, describe_fault, is_users
from fp8rl_jax.rl.advantages import ESTIMATOR_KEY, group_advantages
from fp8rl_jax.rl.correction import WEIGHTS_KEY, correction, importance_weights, refuse_partial
from fp8rl_jax.rl.metrics import (
    Mask,
    Maximum,
    Mean,
    Metrics,
    check_shapes,
    clamp_log_ratio,
    k3,
    masked_count,
    masked_mean,
    masked_sum,
    per_token,
)
from fp8rl_jax.rl.objectives import (
    OBJECTIVE_KEY,
    TokenInputs,
    kl_penalty,
    policy_ratio,
    token_losses,
)
from fp8rl_jax.rl.selection import SELECTION_KEY, SelectionInputs, select


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """What the loss needs of one micro-batch.

    Log-probabilities are of the sampled tokens, float32, at the temperature of the rollout. Padding
    may hold anything.
    """

    logprobs: Float[Array, "B T"]
    """Under the policy that is trained; the only field that carries a gradient."""
    advantages: Float[Array, " B"] | Float[Array, "B T"]
    """One a completion, or one a token."""
    mask: Mask
    """[B, T]: the completion tokens in the loss."""
    denominator: Float[Array, ""]
    """`loss_denominator` of the global batch."""
    old_logprobs: Float[Array, "B T"] | None = None
    """Under the policy at the start of the update; None: the policy has not changed since, so they
    are `logprobs`."""
    weights: Float[Array, "B T"] | None = None
    """Importance weights of `correction`; None: 1."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """Under the reference policy; needed where kl_coefficient is above 0, measured as the metric
    `kl` where given."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy of each token's distribution, in nats: the metric `entropy`. With entropy_coefficient
    above 0 it is needed, and it must carry a gradient, or the bonus is a constant."""
    clip_bounds: Float[Array, " bounds"] | None = None
    """Bounds of the ratio from `calibrated_bounds`; None: 1 - clip_low and 1 + clip_high."""


def policy_loss(inputs: LossInputs, config: LossConfig) -> tuple[Float[Array, ""], Metrics]:
    """Compute the policy loss of one micro-batch, as its part of the global batch's loss.

    Log-ratios are clamped to +-20 before exp, as in verl; beyond that a token has no gradient. A
    NaN at a token in the mask makes the loss NaN. Departures from verl and NeMo RL: `policy_ratio`,
    `kl_penalty` and the head of this file.

    Args:
        inputs: log-probabilities, advantages, mask and the global denominator.
        config: objective, clip bounds, KL and entropy terms, aggregation.

    Returns:
        loss: summed over micro-batches it is the global loss, and its gradients add likewise.
        metrics: `loss`, `policy_loss` (without KL and entropy), `approx_kl` (k3 of
            KL(pi_old || pi_theta)), `ratio_max`; `kl` and `entropy` where their inputs were given;
            and the objective's own. Of the built-in ones these are, as fractions of all tokens,
            `clip_ratio/low_mean` (A < 0, r < 1 - clip_low), `clip_ratio/high_mean` (A > 0,
            r > 1 + clip_high; both by clip_bounds where they are given), `clip_ratio/region_mean`
            (either; CISPO: of any A), and where dual_clip is set `clip_ratio/dual_mean` (A < 0,
            r > dual_clip).

    Raises:
        UserError: an objective that is not built in, as `token_losses` says.
        ValueError: an array's shape is not the mask's, or an array that a coefficient needs is
            missing.
    """
    check_shapes(
        inputs.mask,
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        weights=inputs.weights,
        reference_logprobs=inputs.reference_logprobs,
        entropy=inputs.entropy,
    )
    if config.kl_coefficient > 0 and inputs.reference_logprobs is None:
        raise ValueError("rl.kl_coefficient is above 0, but reference_logprobs were not given")
    if config.entropy_coefficient > 0 and inputs.entropy is None:
        raise ValueError("rl.entropy_coefficient is above 0, but entropy was not given")
    mask = inputs.mask.astype(bool)
    advantages = jax.lax.stop_gradient(per_token(inputs.advantages, mask))
    old = jax.lax.stop_gradient(
        inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    )

    def constant(values: Array) -> Array:
        return jax.lax.stop_gradient(jnp.where(mask, values, 0.0))

    tokens = TokenInputs(
        logprobs=jnp.where(mask, inputs.logprobs, 0.0),
        old_logprobs=constant(old),
        ratio=policy_ratio(inputs.logprobs, old, mask, config.ratio),
        advantages=advantages,
        mask=mask,
        weights=jnp.ones_like(old)
        if inputs.weights is None
        else jax.lax.stop_gradient(inputs.weights),
        bounds=(1 - config.clip_low, 1 + config.clip_high)
        if inputs.clip_bounds is None
        else (inputs.clip_bounds[0], inputs.clip_bounds[1]),
        entropy=None if inputs.entropy is None else constant(inputs.entropy),
        reference_logprobs=None
        if inputs.reference_logprobs is None
        else constant(inputs.reference_logprobs),
    )
    objective, measured = token_losses(tokens, config)
    if inputs.weights is not None:
        objective = objective * tokens.weights

    log_ratio = clamp_log_ratio(jnp.where(mask, jax.lax.stop_gradient(inputs.logprobs) - old, 0.0))
    metrics = {
        "policy_loss": aggregate(objective, mask, config),
        "approx_kl": Mean.of(k3(log_ratio), mask),
        "ratio_max": Maximum.of(tokens.ratio, mask),
        **{name: Mean.of(values, mask) for name, values in measured.items()},
    }
    if inputs.entropy is not None:
        metrics["entropy"] = Mean.of(inputs.entropy, mask)
        if config.entropy_coefficient > 0:
            objective = objective - config.entropy_coefficient * inputs.entropy
    if inputs.reference_logprobs is not None:
        kl = kl_penalty(inputs.logprobs, inputs.reference_logprobs, mask, config)
        metrics["kl"] = Mean.of(kl, mask)
        if config.kl_coefficient > 0:
            objective = objective + config.kl_coefficient * kl
    metrics["loss"] = aggregate(objective, mask, config)
    return metrics["loss"].numerator / inputs.denominator, metrics


def corrected_policy_loss(
    inputs: LossInputs, rollout_logprobs: Float[Array, "B T"], config: RLConfig
) -> tuple[Float[Array, ""], Metrics]:
    """Compute `policy_loss` with the correction that the config names.

    For a rollout whose policy is not quite the trainer's.

    decoupled: r = pi_theta / pi_old in the loss, weights and rejection from rho = pi_old /
    pi_rollout. bypass: r = pi_theta / pi_rollout; weights (with bypass_loss "reinforce" only) and
    rejection from that ratio too, at the present policy, as in verl. old_logprobs are not needed
    and not read.

    It sees one micro-batch. A correction that needs the whole batch
    (`CorrectionConfig.whole_batch`) is refused; do it before, with `correction`, `loss_denominator`
    of the mask that it returns, and `policy_loss` with its weights.

    Args:
        inputs: without weights; old_logprobs may be None where one update follows each rollout.
        rollout_logprobs: of the sampled tokens, as the function `rollout_logprobs` selects them.
        config: loss and correction, whose method is one of those named and not "recipe".

    Returns:
        Loss and metrics of `policy_loss`, and the metrics of `correction`.

    Raises:
        UserError: the correction needs the whole batch, or its method is still "recipe".
        ValueError: the inputs already have weights.
    """
    if inputs.weights is not None:
        raise ValueError(
            "corrected_policy_loss computes the weights; leave LossInputs.weights unset"
        )
    check_shapes(inputs.mask, rollout_logprobs=rollout_logprobs)
    settings = config.correction.filled()
    refuse_partial(settings)
    bypass = settings.mode == "bypass"
    old = inputs.logprobs if bypass or inputs.old_logprobs is None else inputs.old_logprobs
    old = jax.lax.stop_gradient(old)
    weights, mask, correction_metrics = correction(
        old - rollout_logprobs, inputs.mask, settings, old
    )
    loss, metrics = policy_loss(
        dataclasses.replace(
            inputs, old_logprobs=rollout_logprobs if bypass else old, weights=weights, mask=mask
        ),
        _loss_settings(config),
    )
    return loss, metrics | correction_metrics


def _loss_settings(config: RLConfig) -> RLConfig:
    """The config that the loss is computed with: bypass mode with bypass_loss "reinforce" replaces
    the objective."""
    settings = config.correction
    if settings.value("mode") == "bypass" and settings.value("bypass_loss") == "reinforce":
        return dataclasses.replace(config, objective="reinforce", ratio="token", dual_clip=None)
    return config


def aggregate(values: Shaped[Array, "B T"], mask: Mask, config: LossConfig) -> Mean:
    """Compute the rows' share of the batch's mean.

    Numerators and denominators of micro-batches add up to the whole batch's. A token_sum's mean is
    that over tokens: only its loss is not divided.
    """
    if config.aggregation in ("token_mean", "token_sum"):
        return Mean.of(values, mask)
    completions = masked_count(mask.astype(bool).any(axis=1))
    match config.aggregation:
        case "sequence_mean":
            return Mean(masked_mean(values, mask, axis=1).sum(), completions)
        case "sequence_sum":
            return Mean(masked_sum(values, mask), completions)
        case _:
            length = mask.shape[1] if config.fixed_length is None else config.fixed_length
            return Mean(masked_sum(values, mask), completions * length)


def loss_denominator(mask: Mask, config: LossConfig) -> Float[Array, ""]:
    """Compute what the loss of the global batch divides by, at least 1; 1 for token_sum.

    Args:
        mask: the tokens in the loss, of the whole batch: after a rejection that takes tokens out of
            the denominator.
        config: aggregation, fixed_length.
    """
    if config.aggregation == "token_sum":
        return jnp.float32(1)
    return jnp.maximum(aggregate(mask, mask, config).denominator, 1.0)


_FLAT = "the derivatives of its losses by inputs.logprobs, and by the inputs.ratio of these,"


def _nothing_learned(found: Sequence[Array]) -> str:
    """What is wrong with all that a function gives; empty where nothing is."""
    values = [np.asarray(x) for x in found]
    if not any(np.isfinite(x).all() for x in values):
        return "are not finite"
    return "" if any(x.any() for x in values) else "are all 0, so that nothing could be learned"


def check_functions(config: RLConfig, samples_per_prompt: int = 4) -> None:
    """Try the objective, estimator, weights and selection that are the user's.

    They are traced on shapes; then the objective's gradient, advantages and weights of a few drawn
    numbers are looked at, so that a function of which nothing can be learned is found here.

    Args:
        config: resolved or not.
        samples_per_prompt: n of the run.

    Raises:
        UserError: one line for each that does not import, was edited after it was loaded, does not
            take its arguments, raises an exception, returns something else than it should, or
            gives nothing but zeros, or no finite numbers, in a gradient, advantages or weights.
    """
    # no two axes of the same length, or a wrong shape could look right
    prompts = 3 if samples_per_prompt == 2 else 2
    rows = prompts * samples_per_prompt
    shape = jax.ShapeDtypeStruct
    values, mask = shape((rows, rows + 1), jnp.float32), shape((rows, rows + 1), bool)
    rewards, valid, lengths = (shape((rows,), dtype) for dtype in (jnp.float32, bool, jnp.int32))
    reference = values if config.kl_coefficient > 0 or config.reward_kl.coefficient > 0 else None
    inputs = (values, rewards, mask, shape((), jnp.float32), values, values, reference, values)

    def loss(*inputs):
        return policy_loss(LossInputs(*inputs), config)

    def estimated(rewards, valid, lengths):
        return group_advantages(rewards, samples_per_prompt, config.advantage, valid, lengths)

    def weighted(log_ratio, mask):
        return importance_weights(log_ratio, mask, config.correction)

    def selected(advantages, rewards, valid, lengths, stopped):
        key = jax.random.key(0)
        return select(SelectionInputs(advantages, rewards, valid, lengths, stopped, key), config)

    groups = [
        shape((prompts, samples_per_prompt), dtype)
        for dtype in (jnp.float32, jnp.float32, bool, jnp.int32, bool)
    ]
    draw = np.random.default_rng(0)
    of_tokens = (rows, rows + 1)

    def drawn(values: np.ndarray) -> Array:
        return jnp.asarray(values, jnp.float32)

    likely = drawn(-draw.exponential(size=of_tokens))
    ratios = drawn(draw.normal(scale=0.3, size=of_tokens))
    signed, ones = drawn(draw.normal(size=rows)), jnp.ones(of_tokens)  # rewards and advantages
    everywhere, one = jnp.ones(of_tokens, bool), jnp.float32(1)
    alone = dataclasses.replace(config, kl_coefficient=0.0, entropy_coefficient=0.0)

    def gradients() -> list[Array]:
        def of_logprobs(logprobs, old):
            known = None if reference is None else likely
            given = LossInputs(logprobs, signed, everywhere, one, old, ones, known, ones)
            return policy_loss(given, alone)[0]

        # of the policy that sampled, and of one that has moved
        return [jax.grad(of_logprobs)(likely, old) for old in (likely, likely - ratios)]

    def some_advantages() -> list[Array]:
        return [estimated(signed, jnp.ones(rows, bool), jnp.arange(rows) + 1)]

    def some_weights() -> list[Array]:
        return [weighted(ratios, everywhere)[0]]

    own_weights = config.correction.value("weights")
    checks = (
        (SELECTION_KEY, config.selection, selected, groups, None, ""),
        (OBJECTIVE_KEY, config.objective, jax.grad(loss, has_aux=True), inputs, gradients, _FLAT),
        (
            ESTIMATOR_KEY,
            config.advantage.estimator,
            estimated,
            (rewards, valid, lengths),
            some_advantages,
            "its advantages of rewards that differ",
        ),
        (WEIGHTS_KEY, own_weights, weighted, (values, mask), some_weights, "its weights"),
    )
    faults = []
    for key, name, function, arguments, tried, what in checks:
        if not is_users(name):
            continue
        try:
            check_unchanged(name, key)
            jax.eval_shape(function, *arguments)
            if tried is not None and (fault := _nothing_learned(tried())):
                faults.append(f"{key} = {name!r}: {what} {fault}")
        except UserError as fault:
            faults.append(str(fault))
        # of the derivative, which is made after the function has returned
        except Exception as fault:
            faults.append(f"{key} = {name!r}: {describe_fault(fault)}")
    if faults:
        raise UserError("\n".join(faults))

"""Advantages without a value network: a completion is better or worse than others, never good or bad by itself.

The others are the completions of the same prompt (GRPO, Dr. GRPO, RLOO), or of the whole batch (REINFORCE++). GRPO divides
the difference by the group's standard deviation, which gives an easy and a hard prompt the same say; Dr. GRPO does not,
because the division over-weights prompts that are nearly always, or nearly never, solved. A group of equal rewards teaches
nothing and gets exact zeros: rewards are compared with each other, since the rounding of their mean, divided by epsilon,
could pass for a signal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.rl import AdvantageConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.masked import masked_count, masked_mean, masked_sum, safe_divide


def group_advantages(
    rewards: Float[Array, " B"],
    samples_per_prompt: int,
    config: AdvantageConfig,
    valid: Bool[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """Advantages of the completions of one rollout.

    GRPO (arXiv 2402.03300): (r - mean) / (std + epsilon), std dividing by n - ddof.
    Dr. GRPO (arXiv 2503.20783): r - mean.
    RLOO (arXiv 2402.14740): r - mean of the other completions of the prompt. Departs from verl where a prompt has a single
    valid completion: it gets 0 here, and its reward there.
    REINFORCE++ (arXiv 2501.03262): (r - mean) / (std + epsilon) over the tokens of the batch; reinforce_pp_baseline
    subtracts the prompt's mean first. Departs from the paper, which has a KL penalty for each token in the reward (here it
    is a term of the loss, or `reward_kl` of the whole completion), and from verl and NeMo RL in epsilon, which they add to
    the variance, or bound it by.

    Args:
        rewards: one scalar a completion; row b belongs to prompt b // samples_per_prompt.
        samples_per_prompt: n, at least 2; reinforce_pp needs no second completion of a prompt.
        config: estimator, ddof and epsilon.
        valid: False where a completion has no reward (its grader failed): it gets 0 and is left out of every mean and
            standard deviation. By default all are valid.
        lengths: tokens of each completion, by which REINFORCE++ weighs mean and standard deviation of the batch; by default
            each completion counts once. The others do not read it.

    Returns:
        One constant advantage a completion, float32. A non-finite reward that is not marked invalid makes its group's
        advantages NaN (REINFORCE++: all).

    Raises:
        UserError: fewer than 2 samples a prompt, or a number of rewards that they do not divide.
    """
    alone = config.estimator == "reinforce_pp"
    groups, counted = _groups(rewards, samples_per_prompt, valid, least=1 if alone else 2)
    deviation = jnp.where(counted, groups - (0.0 if alone else masked_mean(groups, counted, axis=1)[:, None]), 0.0)
    constant = _constant(groups, counted)[:, None]
    match config.estimator:
        case "grpo":
            deviation = deviation / (_std(deviation, counted, config.ddof)[:, None] + config.epsilon)
        case "rloo":
            count = masked_count(counted, axis=1)[:, None]
            deviation = deviation * safe_divide(count, count - 1.0)
        case "reinforce_pp":
            return jax.lax.stop_gradient(_whiten(deviation.reshape(-1), counted.reshape(-1), lengths, config))
        case "reinforce_pp_baseline":
            deviation = jnp.where(constant, 0.0, deviation).reshape(-1)
            return jax.lax.stop_gradient(_whiten(deviation, counted.reshape(-1), lengths, config))
    return jax.lax.stop_gradient(jnp.where(constant, 0.0, deviation).reshape(-1))


def reward_metrics(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None = None
) -> dict[str, Float[Array, ""]]:
    """reward/mean over completions; reward/std within a group (ddof 0) and reward/frac_zero_std over prompts.

    Prompts without a valid reward are left out. Arguments and errors as in `group_advantages`.
    """
    groups, counted = _groups(rewards, samples_per_prompt, valid)
    graded = counted.any(axis=1)
    deviation = groups - masked_mean(groups, counted, axis=1)[:, None]
    return {
        "reward/mean": masked_mean(groups, counted),
        "reward/std": masked_mean(_std(deviation, counted, ddof=0), graded),
        "reward/frac_zero_std": masked_mean(_constant(groups, counted), graded),
    }


def constant_groups(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None = None
) -> Bool[Array, " P"]:
    """Prompts without two valid rewards that differ. Arguments and errors as in `group_advantages`."""
    return _constant(*_groups(rewards, samples_per_prompt, valid))


def _groups(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None, least: int = 2
) -> tuple[Float[Array, "P n"], Bool[Array, "P n"]]:
    if samples_per_prompt < least:
        raise UserError(
            f"rollout.samples_per_prompt: {samples_per_prompt} leaves nothing to compare with; set {least} or more"
        )
    if len(rewards) % samples_per_prompt:
        raise UserError(
            f"rollout.samples_per_prompt: {samples_per_prompt} does not divide the {len(rewards)} rewards of a batch"
        )
    groups = jnp.asarray(rewards, jnp.float32).reshape(-1, samples_per_prompt)
    return groups, jnp.ones_like(groups, bool) if valid is None else jnp.asarray(valid, bool).reshape(groups.shape)


def _std(deviation: Float[Array, "P n"], counted: Bool[Array, "P n"], ddof: int) -> Float[Array, " P"]:
    return jnp.sqrt(masked_sum(deviation**2, counted, axis=1) / jnp.maximum(masked_count(counted, axis=1) - ddof, 1.0))


def _constant(groups: Float[Array, "P n"], counted: Bool[Array, "P n"]) -> Bool[Array, " P"]:
    return jnp.where(counted, groups, -jnp.inf).max(axis=1) <= jnp.where(counted, groups, jnp.inf).min(axis=1)


def _whiten(
    values: Float[Array, " B"], counted: Bool[Array, " B"], lengths: Int[Array, " B"] | None, config: AdvantageConfig
) -> Float[Array, " B"]:
    """(values - mean) / (std + epsilon) over the entries that count, each as often as it is long; exact zeros where all are
    equal."""
    share = counted.astype(jnp.float32) if lengths is None else jnp.where(counted, lengths, 0).astype(jnp.float32)
    total = share.sum()
    values = jnp.where(counted, values, 0.0)
    deviation = values - safe_divide((share * values).sum(), total)
    std = jnp.sqrt((share * deviation**2).sum() / jnp.maximum(total - config.ddof, 1.0))
    equal = _constant(values[None], (share > 0)[None])[0]
    return jnp.where(counted & ~equal, deviation / (std + config.epsilon), 0.0)

"""From rewards to advantages, and which samples count: GRPO, Dr. GRPO, RLOO, REINFORCE++ and DAPO.

There is no value network: a completion is compared with the others of the same prompt (GRPO,
Dr. GRPO, RLOO), or with those of the whole batch (REINFORCE++). GRPO divides the difference by the
group's standard deviation, which gives an easy and a hard prompt the same say; Dr. GRPO does not,
because the division over-weights prompts that are nearly always, or nearly never, solved. A group
of equal rewards has no gradient and gets exact zeros: rewards are compared with each other, since
the rounding of their mean, divided by epsilon, could pass for a signal. Departs from verl where a
prompt has a single valid completion: with nothing to compare with it is 0 above its group here, and
its whole reward there.

Any other estimator is a function of one's own with the signature of those below
(docs/objectives.md), `rl.advantage.estimator = "module:function"`:

    estimator(inputs: RewardInputs, config: AdvantageConfig, **arguments) -> advantages [P, n]

DAPO (arXiv 2503.14476) chooses the prompts and treats long completions: `informative_groups`,
`overlong_penalty`, `drop_truncated`. Its other parts are settings of the loss: clip_high and
aggregation "token_mean".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.rl import AdvantageConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.functions import call, floats
from fp8rl_jax.rl.metrics import Mask, masked_count, masked_mean, masked_sum, safe_divide

ESTIMATOR_KEY = "rl.advantage.estimator"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RewardInputs:
    """What an advantage estimator computes from: the completions of P prompts, n of each."""

    rewards: Float[Array, "P n"]
    """One a completion, float32; 0 where it is not valid."""
    valid: Bool[Array, "P n"]
    """False where a completion has no reward, because its grader failed."""
    lengths: Int[Array, "P n"]
    """Tokens of each completion; 1 where they were not given."""


Estimator = Callable[..., Float[Array, "P n"]]
"""(inputs, config, **arguments) -> one advantage a completion; those that are not valid get 0
whatever it returns."""


def grpo(inputs: RewardInputs, config: AdvantageConfig) -> Float[Array, "P n"]:
    """Compare with the prompt's completions: GRPO, (r - mean) / (std + epsilon).

    arXiv 2402.03300. The standard deviation divides by n - ddof.
    """
    deviation = _deviation(inputs)
    std = _std(deviation, inputs.valid, config.ddof)[:, None]
    return _unless_constant(deviation / (std + config.epsilon), inputs)


def dr_grpo(inputs: RewardInputs, config: AdvantageConfig) -> Float[Array, "P n"]:
    """Compare with the prompt's completions, undivided: Dr. GRPO, r - mean.

    arXiv 2503.20783.
    """
    return _unless_constant(_deviation(inputs), inputs)


def rloo(inputs: RewardInputs, config: AdvantageConfig) -> Float[Array, "P n"]:
    """Compare with the other completions of the prompt: RLOO, r - mean of the others.

    arXiv 2402.14740.
    """
    count = masked_count(inputs.valid, axis=1)[:, None]
    return _unless_constant(_deviation(inputs) * safe_divide(count, count - 1.0), inputs)


def reinforce_pp(inputs: RewardInputs, config: AdvantageConfig) -> Float[Array, "P n"]:
    """Compare with the batch: REINFORCE++, (r - mean) / (std + epsilon) over its tokens.

    arXiv 2501.03262.

    Departs from the paper, which has a KL penalty for each token in the reward (here it is a term
    of the loss, or `reward_kl` of the whole completion), and from verl and NeMo RL in epsilon,
    which they add to the variance, or bound it by.
    """
    return _whiten(inputs.rewards, inputs, config)


def reinforce_pp_baseline(inputs: RewardInputs, config: AdvantageConfig) -> Float[Array, "P n"]:
    """Compare r - the prompt's mean with the batch: REINFORCE++ with a baseline."""
    return _whiten(_unless_constant(_deviation(inputs), inputs), inputs, config)


BUILT_IN: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def check_rewards(rewards: Sequence[float] | np.ndarray, valid: np.ndarray | None = None) -> None:
    """Refuse rewards of which float32 makes no advantage; on the host.

    Args:
        rewards: one a completion.
        valid: False where a completion has no reward; by default all have one.

    Raises:
        UserError: naming the first row that is not finite, or whose square overflows the sum of
            squares that standard deviations and gradient norms are made of.
    """
    values = np.asarray(rewards, np.float64)
    values = values if valid is None else np.where(valid, values, 0.0)
    if (wrong := np.flatnonzero(~np.isfinite(values))).size:
        raise UserError(
            f"rewards: that of sample {wrong[0]} is {values[wrong[0]]}; give a finite number, or "
            "leave the sample out as one without a reward"
        )
    most = math.sqrt(np.finfo(np.float32).max / max(values.size, 1))
    if (wrong := np.flatnonzero(np.abs(values) > most)).size:
        raise UserError(
            f"rewards: that of sample {wrong[0]} is {values[wrong[0]]:g}, and the squares of "
            f"{values.size} rewards, of which advantages and gradient norms are made, overflow "
            f"float32 above {most:.1g}; scale the rewards down"
        )


def group_advantages(
    rewards: Float[Array, " B"],
    samples_per_prompt: int,
    config: AdvantageConfig,
    valid: Bool[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """Compute the advantages of the completions of one rollout.

    Args:
        rewards: one scalar a completion; row b belongs to prompt b // samples_per_prompt.
        samples_per_prompt: n, at least 2 where completions of a prompt are compared, as all but
            reinforce_pp do.
        config: estimator (a name, or a function's spec), estimator_args, ddof and epsilon.
        valid: False where a completion has no reward (its grader failed): it gets 0 and is left out
            of every mean and standard deviation. By default all are valid.
        lengths: tokens of each completion, by which REINFORCE++ weighs mean and standard deviation
            of the batch; by default each completion counts once. The other built-in ones do not
            read it.

    Returns:
        One constant advantage a completion, float32. Where `rewards` is traced, a non-finite one
        that is not marked invalid makes its group's advantages NaN (REINFORCE++: all).

    Raises:
        UserError: rewards that `check_rewards` refuses, where they are not traced; too few samples
            a prompt, or a number of rewards that they do not divide; an estimator that does not
            import, does not take (inputs, config, **estimator_args), raises an exception, or
            returns something else than [P, n] floats.
    """
    groups, counted = _groups(rewards, samples_per_prompt, valid, least=1)
    lengths = counted.astype(jnp.int32) if lengths is None else jnp.asarray(lengths)
    inputs = RewardInputs(jnp.where(counted, groups, 0.0), counted, lengths.reshape(groups.shape))
    advantages = call(
        ESTIMATOR_KEY, config.estimator, BUILT_IN, inputs, config, config.estimator_args
    )
    advantages = floats(ESTIMATOR_KEY, config.estimator, advantages, groups.shape, "[P, n]")
    return jax.lax.stop_gradient(jnp.where(counted, advantages, 0.0).reshape(-1))


def reward_metrics(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Measure the rewards of a rollout: mean, spread within groups, groups without spread.

    reward/mean is over completions; reward/std, within a group (ddof 0), and reward/frac_zero_std
    over prompts.

    Prompts without a valid reward are left out. Arguments and errors as in `group_advantages`.
    """
    groups, counted = _groups(rewards, samples_per_prompt, valid, least=1)
    graded = counted.any(axis=1)
    deviation = groups - masked_mean(groups, counted, axis=1)[:, None]
    return {
        "reward/mean": masked_mean(groups, counted),
        "reward/std": masked_mean(_std(deviation, counted, ddof=0), graded),
        "reward/frac_zero_std": masked_mean(_constant(groups, counted), graded),
    }


def _groups(
    rewards: Float[Array, " B"],
    samples_per_prompt: int,
    valid: Bool[Array, " B"] | None,
    least: int = 2,
) -> tuple[Float[Array, "P n"], Bool[Array, "P n"]]:
    _check_samples(samples_per_prompt, least)
    if len(rewards) % samples_per_prompt:
        raise UserError(
            f"rollout.samples_per_prompt: {samples_per_prompt} does not divide the "
            f"{len(rewards)} rewards of a batch"
        )
    if not any(isinstance(x, Tracer) for x in (rewards, valid)):
        check_rewards(np.asarray(rewards), None if valid is None else np.asarray(valid))
    groups = jnp.asarray(rewards, jnp.float32).reshape(-1, samples_per_prompt)
    if valid is None:
        return groups, jnp.ones_like(groups, bool)
    return groups, jnp.asarray(valid, bool).reshape(groups.shape)


def _check_samples(samples_per_prompt: int, least: int) -> None:
    if samples_per_prompt < least:
        raise UserError(
            f"rollout.samples_per_prompt: {samples_per_prompt} leaves nothing to compare with; "
            f"set {least} or more"
        )


def _deviation(inputs: RewardInputs) -> Float[Array, "P n"]:
    """r - mean of the prompt's completions; 0 where it is not valid."""
    _check_samples(inputs.rewards.shape[1], least=2)
    mean = masked_mean(inputs.rewards, inputs.valid, axis=1)[:, None]
    return jnp.where(inputs.valid, inputs.rewards - mean, 0.0)


def _unless_constant(values: Float[Array, "P n"], inputs: RewardInputs) -> Float[Array, "P n"]:
    """Exact zeros for the prompts whose rewards are all equal."""
    return jnp.where(_constant(inputs.rewards, inputs.valid)[:, None], 0.0, values)


def _std(
    deviation: Float[Array, "P n"], counted: Bool[Array, "P n"], ddof: int
) -> Float[Array, " P"]:
    degrees = jnp.maximum(masked_count(counted, axis=1) - ddof, 1.0)
    return jnp.sqrt(masked_sum(deviation**2, counted, axis=1) / degrees)


def _constant(groups: Float[Array, "P n"], counted: Bool[Array, "P n"]) -> Bool[Array, " P"]:
    largest = jnp.where(counted, groups, -jnp.inf).max(axis=1)
    return largest <= jnp.where(counted, groups, jnp.inf).min(axis=1)


def _whiten(
    values: Float[Array, "P n"], inputs: RewardInputs, config: AdvantageConfig
) -> Float[Array, "P n"]:
    """(values - mean) / (std + epsilon) over the entries that count, each as often as it is long;
    exact zeros where all are equal."""
    shape, values, counted = values.shape, values.reshape(-1), inputs.valid.reshape(-1)
    share = jnp.where(counted, inputs.lengths.reshape(-1), 0).astype(jnp.float32)
    total = share.sum()
    values = jnp.where(counted, values, 0.0)
    deviation = values - safe_divide((share * values).sum(), total)
    std = jnp.sqrt((share * deviation**2).sum() / jnp.maximum(total - config.ddof, 1.0))
    equal = _constant(values[None], (share > 0)[None])[0]
    return jnp.where(counted & ~equal, deviation / (std + config.epsilon), 0.0).reshape(shape)


def informative_groups(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None = None
) -> Bool[Array, " P"]:
    """Find the prompts whose completions do not all have the same reward.

    The advantages of the others are 0.

    Dynamic sampling (DAPO section 3.2) drops those and samples new prompts until the batch is full.
    Give it the task's rewards, before `overlong_penalty`, as verl and NeMo RL do: a group that
    differs in length alone says nothing of the task. Departs from the paper, which asks for an
    accuracy strictly between 0 and 1: any two rewards that differ will do.

    Args:
        rewards: one scalar a completion; row b belongs to prompt b // samples_per_prompt.
        samples_per_prompt: n, at least 2.
        valid: False where a completion has no reward; by default all have one. A prompt with fewer
            than two is not informative.

    Raises:
        UserError: as `group_advantages`.
    """
    return ~_constant(*_groups(rewards, samples_per_prompt, valid))


def overlong_penalty(
    lengths: Int[Array, " B"], max_new_tokens: int, buffer: int, penalty: float = 1.0
) -> Float[Array, " B"]:
    """Compute what a completion's length adds to its reward: 0 down to -penalty.

    Soft overlong punishment, DAPO section 3.4.

    0 up to max_new_tokens - buffer tokens, then linear to -penalty at max_new_tokens, and no less
    beyond. verl has no lower bound, which is the same as long as no completion is longer than
    max_new_tokens.

    Args:
        lengths: tokens of each completion, its stop token included.
        max_new_tokens: the longest completion.
        buffer: tokens over which the penalty grows; 0 for no penalty.
        penalty: its full size.

    Raises:
        UserError: the buffer is longer than the completion may be.
    """
    if buffer > max_new_tokens:
        raise UserError(
            f"rl.overlong.buffer: {buffer} is more than rollout.max_new_tokens = {max_new_tokens}"
        )
    if not buffer:
        return jnp.zeros(lengths.shape, jnp.float32)
    exceeded = jnp.asarray(lengths, jnp.float32) - (max_new_tokens - buffer)
    return -penalty * jnp.clip(exceeded / buffer, 0.0, 1.0)


def drop_truncated(mask: Mask, stopped: Bool[Array, " B"]) -> Bool[Array, "B T"]:
    """Mask the completions that were truncated at the length limit.

    Overlong filtering, DAPO section 3.4.

    It is a mask for the loss alone: the model still attends to those tokens, and mismatch metrics
    still count them.

    Args:
        mask: completion tokens [B, T].
        stopped: completions that ended with a stop token.
    """
    return mask.astype(bool) & stopped[:, None]

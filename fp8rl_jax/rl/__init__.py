"""The reinforcement-learning objective as pure functions: arrays in, arrays out.

One GRPO step on a rollout of P prompts with n samples each, B = P * n completions of T tokens. In a
run the precision recipe names the correction; here one names it oneself, "none" included:

    config = rl.RLConfig(correction=rl.CorrectionConfig("token_tis"))

    advantages = rl.group_advantages(rewards, n, config.advantage)             # [B]
    denominator = rl.loss_denominator(mask, config)  # tokens of the global batch

    def loss_fn(params):  # of one micro-batch; losses add
        logprobs = model_logprobs(params, tokens)  # [B, T]; the model is the caller's
        inputs = rl.LossInputs(logprobs, advantages, mask, denominator)
        return rl.corrected_policy_loss(inputs, rollout_logprobs, config)      # loss, metrics

    (loss, metrics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    mismatch = rl.mismatch_metrics(rollout_logprobs, train_logprobs, mask)
    numbers = rl.metric_values(metrics | mismatch)

A correction that needs the whole batch at once (a mean weight, a rejection that changes the
denominator: see `CorrectionConfig.whole_batch`) is made before the update, from old
log-probabilities:

    weights, mask, metrics = rl.correction(old_logprobs - rollout_logprobs, mask, config.correction)
    denominator = rl.loss_denominator(mask, config)
    inputs = rl.LossInputs(logprobs, advantages, mask, denominator, old_logprobs, weights)
    loss, metrics = rl.policy_loss(inputs, config)

Its pieces stand alone: `policy_loss` knows nothing of the rollout, `correction` nothing of the
loss. Formulas, each with its paper and departures, head the files: advantages, objectives, loss,
correction, mismatch, selection, sharpness. An objective, an estimator of advantages, importance
weights or a rule of which samples teach of one's own: docs/objectives.md.
"""

from fp8rl_jax.config.rl import (
    AcceptanceConfig,
    AdvantageConfig,
    CorrectionConfig,
    DynamicSamplingConfig,
    LossConfig,
    OverlongConfig,
    RewardKLConfig,
    RLConfig,
    check_sampling,
)
from fp8rl_jax.rl.acceptance import inference_gap
from fp8rl_jax.rl.advantages import (
    RewardInputs,
    check_rewards,
    drop_truncated,
    group_advantages,
    informative_groups,
    overlong_penalty,
    reward_metrics,
)
from fp8rl_jax.rl.correction import (
    RatioInputs,
    correction,
    importance_ratio,
    importance_weights,
    kept_tokens,
    refuse_partial,
    rollout_logprobs,
)
from fp8rl_jax.rl.loss import (
    LossInputs,
    aggregate,
    check_functions,
    corrected_policy_loss,
    loss_denominator,
    policy_loss,
)
from fp8rl_jax.rl.metrics import Maximum, Mean, Metrics, add_metrics, metric_values, reduce_metrics
from fp8rl_jax.rl.mismatch import mismatch_metrics
from fp8rl_jax.rl.objectives import (
    TokenInputs,
    calibrated_bounds,
    kl_penalty,
    policy_ratio,
    reward_kl,
)
from fp8rl_jax.rl.selection import SelectionInputs, check_rows, select
from fp8rl_jax.rl.sharpness import sharpness, sharpness_metrics

__all__ = [
    "AcceptanceConfig",
    "AdvantageConfig",
    "CorrectionConfig",
    "DynamicSamplingConfig",
    "LossConfig",
    "LossInputs",
    "Maximum",
    "Mean",
    "Metrics",
    "OverlongConfig",
    "RLConfig",
    "RatioInputs",
    "RewardInputs",
    "RewardKLConfig",
    "SelectionInputs",
    "TokenInputs",
    "add_metrics",
    "aggregate",
    "calibrated_bounds",
    "check_functions",
    "check_rewards",
    "check_rows",
    "check_sampling",
    "corrected_policy_loss",
    "correction",
    "drop_truncated",
    "group_advantages",
    "importance_ratio",
    "importance_weights",
    "inference_gap",
    "informative_groups",
    "kept_tokens",
    "kl_penalty",
    "loss_denominator",
    "metric_values",
    "mismatch_metrics",
    "overlong_penalty",
    "policy_loss",
    "policy_ratio",
    "reduce_metrics",
    "refuse_partial",
    "reward_kl",
    "reward_metrics",
    "rollout_logprobs",
    "select",
    "sharpness",
    "sharpness_metrics",
]

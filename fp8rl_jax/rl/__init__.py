"""The reinforcement-learning objective as pure functions: arrays in, arrays out. No model, no file, no state.

One GRPO step on a rollout of P prompts with n samples each, B = P * n completions of T tokens:

    advantages = rl.group_advantages(rewards, n, config.advantage)             # [B]
    denominator = rl.loss_denominator(mask, config)                            # tokens of the global batch

    def loss_fn(params):                                                       # of one micro-batch; losses add
        logprobs = score(params, tokens)                                       # [B, T]; the model is the caller's
        inputs = rl.LossInputs(logprobs, advantages, mask, denominator)
        return rl.corrected_policy_loss(inputs, rollout_logprobs, config)      # loss, metrics

    mismatch = rl.mismatch_metrics(rollout_logprobs, train_logprobs, mask)     # rollout against trainer

Its pieces stand alone: `policy_loss` knows nothing of the rollout, `correction` nothing of the loss.
"""

from fp8rl_jax.config.rl import AdvantageConfig, CorrectionConfig, LossConfig, RLConfig, check_sampling
from fp8rl_jax.rl.advantages import group_advantages, reward_metrics
from fp8rl_jax.rl.correction import correction, rollout_logprobs
from fp8rl_jax.rl.loss import LossInputs, corrected_policy_loss, loss_denominator, policy_loss
from fp8rl_jax.rl.metrics import Maximum, Mean, Metrics, add_metrics, metric_values, reduce_metrics
from fp8rl_jax.rl.mismatch import mismatch_metrics

__all__ = [
    "AdvantageConfig",
    "CorrectionConfig",
    "LossConfig",
    "LossInputs",
    "Maximum",
    "Mean",
    "Metrics",
    "RLConfig",
    "add_metrics",
    "check_sampling",
    "correction",
    "corrected_policy_loss",
    "group_advantages",
    "loss_denominator",
    "metric_values",
    "mismatch_metrics",
    "policy_loss",
    "reduce_metrics",
    "reward_metrics",
    "rollout_logprobs",
]

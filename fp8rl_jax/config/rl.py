"""Settings of the reinforcement-learning objective: advantages, policy loss, rollout correction,
DAPO's sampling.

The loss's own keys stand directly under `[rl]`, because they are the ones that people turn
(`--rl.clip-high 0.28`); the rest are tables of their own. A class checks its values when it is
made, and reports all of their faults together. The published algorithms are combinations, each of
them a file of experiments/recipes to lay over a run's:

    GRPO           arXiv 2402.03300    the defaults; the paper itself: aggregation =
                                       "sequence_mean", kl_coefficient = 0.04
    Dr. GRPO       arXiv 2503.20783    advantage.estimator = "dr_grpo", aggregation = "fixed_length"
    DAPO           arXiv 2503.14476    clip_high = 0.28, dynamic_sampling.enabled, overlong.buffer;
                                       aggregation as it is
    GSPO           arXiv 2507.18071    ratio = "sequence", aggregation = "sequence_mean", clip_low =
                                       3e-4, clip_high = 4e-4
    CISPO          arXiv 2506.13585    objective = "cispo", clip_low = 1, clip_high = 4
    RLOO           arXiv 2402.14740    advantage.estimator = "rloo", objective = "reinforce",
                                       aggregation = "sequence_sum"
    REINFORCE++    arXiv 2501.03262    advantage.estimator = "reinforce_pp" or
                                       "reinforce_pp_baseline"
    MIPU           arXiv 2606.29526    acceptance.enabled, correction.method = "token_tis",
                                       aggregation = "sequence_mean", dual_clip = 1.4,
                                       kl_coefficient = 0.001
    P3O            arXiv 2605.12380    objective = "p3o", correction.mode = "bypass"

An objective, an advantage estimator and importance weights may also be functions of one's own:
docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fp8rl_jax.config.correction import CorrectionConfig
from fp8rl_jax.config.schema import above, at_least, one_of, report, unless
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import function_faults, is_users, settle

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
"""Built-in advantage estimators; rl/advantages.py has the functions."""
SELECTIONS = ("informative", "finished")
"""Built-in rules of which samples teach; rl/selection.py has the functions."""
OBJECTIVES = ("clip", "cispo", "reinforce", "p3o")
"""Built-in objectives; rl/objectives.py has the functions."""
_RatioLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
_KLGradient = Literal["estimator", "k2", "score"]
_Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "token_sum"]


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    estimator: str = "grpo"
    """grpo: (r - mean) / (std + epsilon) within the prompt's completions. dr_grpo: r - mean. rloo:
    r - mean of the others. reinforce_pp: (r - mean) / (std + epsilon) over the batch.
    reinforce_pp_baseline: r - the prompt's mean, then that. Or a function of your own,
    `module:function` or `path/to/file.py:function`: docs/objectives.md."""
    estimator_args: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of a function of your own."""
    ddof: Literal[0, 1] = 1
    """A standard deviation divides by n - ddof: 1 as in verl and TRL, 0 for the population's."""
    epsilon: float = 1e-6
    """Added to the standard deviation; not used by dr_grpo and rloo."""

    def __post_init__(self) -> None:
        settle(self, "estimator", "estimator_args")
        key = "rl.advantage.estimator"
        report(
            *function_faults(key, self.estimator, ESTIMATORS, f"{key}_args", self.estimator_args),
            one_of("rl.advantage.ddof", self.ddof, Literal[0, 1]),
            above("rl.advantage.epsilon", self.epsilon, 0.0),
        )


@dataclass(frozen=True)
class RewardKLConfig:
    """KL to the reference policy as a part of the reward (InstructGPT, arXiv 2203.02155; verl's
    use_kl_in_reward)."""

    coefficient: float = 0.0
    """beta of r - beta * KL, where KL is the sum over a completion's tokens of the estimates of
    KL(old || reference); 0: none."""
    estimator: KLEstimator = "k1"
    """As rl.kl_estimator, with the old policy in place of pi_theta. k1 is the log-ratio,
    InstructGPT's."""

    def __post_init__(self) -> None:
        report(
            at_least("rl.reward_kl.coefficient", self.coefficient, 0.0),
            one_of("rl.reward_kl.estimator", self.estimator, KLEstimator),
        )


@dataclass(frozen=True)
class OverlongConfig:
    """What becomes of completions that are too long (DAPO, arXiv 2503.14476, section 3.4)."""

    buffer: int = 0
    """Tokens before rollout.max_new_tokens over which the penalty grows from 0 to its full size; 0:
    no penalty."""
    penalty: float = 1.0
    """Taken from the reward of a completion of rollout.max_new_tokens."""
    filter: bool = False
    """Leave completions that were cut off out of the loss; their rewards still count in the
    baseline."""

    def __post_init__(self) -> None:
        report(
            at_least("rl.overlong.buffer", self.buffer, 0),
            at_least("rl.overlong.penalty", self.penalty, 0.0),
        )


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): only prompts that teach something
    enter the update."""

    enabled: bool = False
    """Drop prompts whose completions all have the same reward, and sample others in their place."""
    max_rounds: int = 10
    """Rollouts in one step at most; after the last, the step goes on with the prompts that it
    has."""

    def __post_init__(self) -> None:
        report(at_least("rl.dynamic_sampling.max_rounds", self.max_rounds, 1))


@dataclass(frozen=True)
class AcceptanceConfig:
    """Updates are taken back where the served policy does not keep what they promised (MIPU, arXiv
    2606.29526, its step 2; rl/acceptance.py). Its step 1 is correction.method "token_tis". Each
    step samples and scores as many completions more, and what is trained and the optimizer's state
    are there twice. Exact mode, which leaves no gap, is off with it. A run does it; a session of
    Python has `hold` and `go_back`."""

    enabled: bool = False
    """Judge each step's updates by optim/inference_gap, of completions that the new served policy
    samples of other training problems, and go back where it is below minus the tolerance
    (optim/rejected)."""
    start: float = 4e-3
    """Tolerance at the first step; the paper's for Qwen3-1.7B, 1e-3 for Qwen3-4B."""
    end: float = 1e-3
    """Tolerance from step `decay_steps` on; the paper's for Qwen3-1.7B, 0 for Qwen3-4B."""
    decay_steps: int = 100
    """Steps over which the tolerance goes linearly from one to the other."""

    def __post_init__(self) -> None:
        report(
            at_least("rl.acceptance.start", self.start, 0.0),
            at_least("rl.acceptance.end", self.end, 0.0),
            at_least("rl.acceptance.decay_steps", self.decay_steps, 1),
        )

    def tolerance(self, step: int) -> float:
        """Return the tolerance of a step, from 0."""
        fallen = min(step / self.decay_steps, 1.0)
        return self.start + fallen * (self.end - self.start)


@dataclass(frozen=True)
class LossConfig:
    """The policy loss. The ratio r is pi_theta / pi_old of a sampled token, A its advantage."""

    objective: str = "clip"
    """clip: PPO's clipped surrogate. cispo: -sg(clip(r)) * A * log pi_theta. reinforce: -A * log
    pi_theta, no ratio. p3o: -sg(min(r, E)) * A * log pi_theta and a KL term of 1 - E, with E the
    effective part of the sample (correction.mode "bypass"). Or a function of your own,
    `module:function` or `path/to/file.py:function`: docs/objectives.md."""
    objective_args: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of a function of your own: objective_args = { alpha = 0.5 }."""
    ratio: _RatioLevel = "token"
    """token: r of each token. sequence: the geometric mean of the sequence's ratios, at each of its
    tokens (GSPO)."""
    clip_low: float = 0.2
    """Where A < 0, r below 1 - clip_low earns nothing more; 1 takes the bound away."""
    clip_high: float = 0.2
    """Where A > 0, r above 1 + clip_high earns nothing more; DAPO's clip-higher is 0.28 (arXiv
    2503.14476)."""
    dual_clip: float | None = None
    """Where A < 0, a token's loss is at most dual_clip * |A| (arXiv 1912.09729); verl: 3, DAPO: 10.
    Unset: no cap."""
    kl_coefficient: float = 0.0
    """Weight of the estimate of KL(policy || reference); 0: no reference policy is needed."""
    kl_estimator: KLEstimator = "k3"
    """With x = log pi_ref - log pi_theta. k1: -x. k2: x^2 / 2. k3: exp(x) - 1 - x."""
    kl_gradient: _KLGradient = "estimator"
    """estimator: the derivative of the formula. k2: that of k2 with the value of the formula
    (verl's "k1+", "k3+"). score: of pi_theta / sg(pi_theta) times the formula (NeMo RL). The last
    two have the gradient of the KL divergence as mean."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: _Aggregation = "token_mean"
    """token_mean: the sum over all tokens of the global batch, divided by their number (DAPO).
    sequence_mean: the mean over completions of their means over tokens (GRPO, GSPO). sequence_sum:
    the mean over completions of their sums; and that, divided by a constant length, is fixed_length
    (Dr. GRPO). token_sum: the sum over all tokens, undivided (verl); the metrics loss and
    policy_loss are means over tokens."""
    fixed_length: int | None = None
    """The constant of fixed_length, in tokens; unset: the width of the batch, which is
    rollout.max_new_tokens, and of episodes (task.max_turns above 1) rollout.max_prompt_tokens +
    rollout.max_new_tokens - 1."""

    def __post_init__(self) -> None:
        settle(self, "objective", "objective_args")
        clips = self.objective == "clip" or is_users(self.objective)
        report(
            *function_faults(
                "rl.objective", self.objective, OBJECTIVES, "rl.objective_args", self.objective_args
            ),
            one_of("rl.ratio", self.ratio, _RatioLevel),
            above("rl.clip_low", self.clip_low, 0.0, at_most=1.0),
            above("rl.clip_high", self.clip_high, 0.0),
            None if self.dual_clip is None else above("rl.dual_clip", self.dual_clip, 1.0),
            unless(
                clips or self.dual_clip is None,
                f'rl.dual_clip: objective "{self.objective}" has nothing that it could cap',
            ),
            unless(
                clips or self.ratio == "token",
                f'rl.ratio: objective "{self.objective}" has no ratio of a sequence; use "clip"',
            ),
            at_least("rl.kl_coefficient", self.kl_coefficient, 0.0),
            one_of("rl.kl_estimator", self.kl_estimator, KLEstimator),
            one_of("rl.kl_gradient", self.kl_gradient, _KLGradient),
            unless(
                not (
                    self.kl_coefficient
                    and self.kl_estimator == "k1"
                    and self.kl_gradient == "estimator"
                ),
                "rl.kl_gradient: the derivative of k1 is that of log pi_theta, whatever the "
                "reference is, and averages to 0; "
                'set rl.kl_gradient to "k2" or "score"',
            ),
            at_least("rl.entropy_coefficient", self.entropy_coefficient, 0.0),
            one_of("rl.aggregation", self.aggregation, _Aggregation),
            None
            if self.fixed_length is None
            else at_least("rl.fixed_length", self.fixed_length, 1),
            unless(
                self.fixed_length is None or self.aggregation == "fixed_length",
                f'rl.fixed_length: aggregation "{self.aggregation}" has no use for it; set '
                'rl.aggregation to "fixed_length"',
            ),
        )


@dataclass(frozen=True)
class ClipCalibrationConfig:
    """Calibrated clipping (arXiv 2609.22870): the bounds of the ratio where the trainer computes in
    FP8, found by passes that do not. Off by default; needs several updates a rollout, because with
    one the ratio is 1."""

    enabled: bool = False
    """Clip at bounds that are calibrated. 1 - rl.clip_low and 1 + rl.clip_high then say what would
    be clipped in the compute dtype, and the calibrated bounds clip as much of the FP8 ratios."""
    every: int = 20
    """Steps between calibrations, the first of them in step 0; each costs two forwards in the
    compute dtype. The paper's 20."""
    smoothing: float = 0.5
    """Part of the old bound that a calibration keeps, below 1. The paper smooths, too; its
    coefficient could not be read."""
    start_low: float | None = None
    """Lower bound before the first calibration; unset: 1 - rl.clip_low. The paper's 0.6."""
    start_high: float | None = None
    """Upper bound before the first calibration; unset: 1 + rl.clip_high. The paper's 1.8."""
    lowest: float = 0.1
    """The lower bound is never below this, whatever a batch says."""
    highest: float = 10.0
    """The upper bound is never above this."""

    def __post_init__(self) -> None:
        key = "rl.clip_calibration"
        report(
            at_least(f"{key}.every", self.every, 1),
            at_least(f"{key}.smoothing", self.smoothing, 0.0),
            unless(
                not self.smoothing >= 1,
                f"{key}.smoothing: {self.smoothing!r} must be below 1, or no calibration has an "
                "effect",
            ),
            None
            if self.start_low is None
            else above(f"{key}.start_low", self.start_low, 0.0, at_most=1.0),
            None
            if self.start_high is None
            else at_least(f"{key}.start_high", self.start_high, 1.0),
            above(f"{key}.lowest", self.lowest, 0.0, at_most=1.0),
            at_least(f"{key}.highest", self.highest, 1.0),
        )

    def start(self, clip_low: float, clip_high: float) -> tuple[float, float]:
        """Return the bounds before the first calibration."""
        low = 1 - clip_low if self.start_low is None else self.start_low
        return low, 1 + clip_high if self.start_high is None else self.start_high


@dataclass(frozen=True)
class RLConfig(LossConfig):
    """The whole objective: a LossConfig, and the steps before it."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rewards to advantages."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Rollout against trainer."""
    reward_kl: RewardKLConfig = field(default_factory=RewardKLConfig)
    """KL to the reference policy, taken from the reward."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Completions that are too long."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Prompts that teach nothing."""
    acceptance: AcceptanceConfig = AcceptanceConfig()
    """Updates that the served policy does not gain by."""
    clip_calibration: ClipCalibrationConfig = ClipCalibrationConfig()
    """Clip bounds of a trainer in FP8."""
    selection: str = ""
    """Which samples of a step teach, and in which order; empty: all, as they are. informative: no
    prompt whose rewards are all equal; finished: no completion that the length limit ended. Or a
    function of your own, `module:function` or `path/to/file.py:function`: docs/objectives.md."""
    selection_args: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of a function of your own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, "selection", "selection_args")
        key = "rl.selection"
        report(
            *function_faults(
                key, self.selection or None, SELECTIONS, f"{key}_args", self.selection_args
            )
        )
        plain = self.objective == "clip" and self.ratio == "token"
        replaced = (
            self.correction.value("mode") == "bypass"
            and self.correction.value("bypass_loss") == "reinforce"
        )
        report(
            unless(
                not (replaced and is_users(self.objective)),
                'rl.correction.bypass_loss: "reinforce" takes the place of rl.objective = '
                f'"{self.objective}"; set it to "ratio"',
            ),
            unless(
                plain or not self.clip_calibration.enabled,
                'rl.clip_calibration: it calibrates rl.objective "clip" with rl.ratio "token"; '
                "turn it off, or set these",
            ),
        )


def check_sampling(
    config: CorrectionConfig,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bad_words: Sequence[str] = (),
    logit_bias: Mapping[str, float] = MappingProxyType({}),
) -> bool:
    """Say whether the settings sample from another distribution than the policy's, if they may.

    Args:
        config: its `truncated_sampling` says whether this is allowed.
        temperature: softmax temperature of the rollout, above 0 for training.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: 0 keeps all tokens.
        bad_words: an empty sequence keeps all tokens.
        logit_bias: an empty table leaves the logits as they are.

    Raises:
        UserError: greedy sampling, another distribution with `truncated_sampling = "refuse"`, or
            one that "replay" has no support of.
    """
    if not temperature > 0:
        raise UserError(
            f"rollout.temperature: {temperature!r} is greedy; training needs a temperature above 0"
        )
    settings: dict[str, tuple[Any, bool]] = {
        "top_k": (top_k, top_k > 0),
        "top_p": (top_p, top_p < 1),
        "min_p": (min_p, min_p > 0),
        "bad_words": (list(bad_words), bool(bad_words)),
        "logit_bias": (dict(logit_bias), bool(logit_bias)),
    }
    active = [f"{name} = {value}" for name, (value, changes) in settings.items() if changes]
    if active and config.truncated_sampling == "refuse":
        raise UserError(
            f"rollout: {', '.join(active)} samples from another distribution than the policy's; "
            "turn it off, or set "
            'rl.correction.truncated_sampling to "replay" (renormalize alike in the trainer), '
            '"behaviour" (correct the difference) or "policy" (leave its bias)'
        )
    if active and config.truncated_sampling == "replay":
        key = "rl.correction.truncated_sampling"
        report(
            unless(
                not logit_bias,
                f'{key}: "replay" renormalizes the logits of the policy, and rollout.logit_bias '
                'samples from others; leave it out, or take "behaviour" or "policy"',
            ),
            unless(
                top_k > 0 or top_p < 1 or min_p > 0,
                f'{key}: "replay" keeps the few tokens that rollout.top_k, top_p or min_p leave, '
                "and without them rollout.bad_words leave nearly the whole vocabulary; set one of "
                'them, or take "behaviour" or "policy"',
            ),
        )
    return bool(active)


__all__ = [
    "ESTIMATORS",
    "OBJECTIVES",
    "AcceptanceConfig",
    "AdvantageConfig",
    "ClipCalibrationConfig",
    "CorrectionConfig",
    "DynamicSamplingConfig",
    "LossConfig",
    "OverlongConfig",
    "RLConfig",
    "RewardKLConfig",
    "check_sampling",
]

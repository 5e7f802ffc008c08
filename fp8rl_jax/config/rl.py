"""Settings of the reinforcement-learning objective: advantages, clipped loss, rollout correction.

The loss's own keys stand directly under `[rl]`, because they are the ones that people turn (`--rl.clip-high 0.28`);
`[rl.advantage]` and `[rl.correction]` are tables of their own. A class checks its values when it is made, and reports
all of their faults together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fp8rl_jax.errors import UserError

Estimator = Literal["grpo", "dr_grpo"]
Aggregation = Literal["token_mean"]
CorrectionMethod = Literal["recipe", "none", "token_tis"]
CorrectionMode = Literal["decoupled", "bypass"]
TruncatedSampling = Literal["refuse", "behaviour", "policy"]


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages, within the group of completions that share a prompt."""

    estimator: Estimator = "grpo"
    """grpo: (r - mean) / (std + epsilon), arXiv 2402.03300. dr_grpo: r - mean, arXiv 2503.20783."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by n - ddof: 1 as in verl and TRL, 0 for the population's."""
    epsilon: float = 1e-6
    """Added to the standard deviation; not used by dr_grpo."""

    def __post_init__(self) -> None:
        _report(
            _one_of("rl.advantage.estimator", self.estimator, Estimator),
            _one_of("rl.advantage.ddof", self.ddof, Literal[0, 1]),
            _above("rl.advantage.epsilon", self.epsilon, 0.0),
        )


@dataclass(frozen=True)
class LossConfig:
    """The clipped policy loss. The ratio r is pi_theta / pi_old of a sampled token, A its advantage."""

    clip_low: float = 0.2
    """Where A < 0, r below 1 - clip_low earns nothing more; 1 takes the bound away."""
    clip_high: float = 0.2
    """Where A > 0, r above 1 + clip_high earns nothing more; DAPO's clip-higher is 0.28 (arXiv 2503.14476)."""
    dual_clip: float | None = None
    """Where A < 0, a token's loss is at most dual_clip * |A| (arXiv 1912.09729); verl: 3, DAPO: 10. Unset: no cap."""
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference); 0: no reference policy is needed."""
    aggregation: Aggregation = "token_mean"
    """token_mean: the sum over all tokens of the global batch, divided by their number (DAPO, verl)."""

    def __post_init__(self) -> None:
        _report(
            _above("rl.clip_low", self.clip_low, 0.0, at_most=1.0),
            _above("rl.clip_high", self.clip_high, 0.0),
            None if self.dual_clip is None else _above("rl.dual_clip", self.dual_clip, 1.0),
            _at_least("rl.kl_coefficient", self.kl_coefficient, 0.0),
            _one_of("rl.aggregation", self.aggregation, Aggregation),
        )


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about a rollout policy that is not quite the trainer's: other formats, other kernels."""

    method: CorrectionMethod = "recipe"
    """none; token_tis: weigh a token by min(pi_old / pi_rollout, max_weight); recipe: as the precision recipe says."""
    mode: CorrectionMode = "decoupled"
    """decoupled: clip pi_theta / pi_old, then weight. bypass: clip pi_theta / pi_rollout, with no weights on top."""
    max_weight: float = 2.0
    """C, the cap on a weight; usual values are 1.5 to 5. Weights have no lower bound."""
    truncated_sampling: TruncatedSampling = "refuse"
    """May top-k, top-p or min-p be on in training, and what do ratios then correct? refuse: an error. behaviour: they
    divide by the truncated distribution that was sampled, so they correct the truncation, inside its support, and the
    numerics; their mean falls below 1. policy: they divide by the full-vocabulary distribution at the same temperature,
    so they correct the numerics alone, and the truncation's bias stays."""

    def __post_init__(self) -> None:
        _report(
            _one_of("rl.correction.method", self.method, CorrectionMethod),
            _one_of("rl.correction.mode", self.mode, CorrectionMode),
            _at_least("rl.correction.max_weight", self.max_weight, 1.0),
            _one_of("rl.correction.truncated_sampling", self.truncated_sampling, TruncatedSampling),
        )

    def resolve(self, recipe_method: str) -> CorrectionConfig:
        """This config with method "recipe" replaced by the precision recipe's own method."""
        return replace(self, method=recipe_method) if self.method == "recipe" else self


@dataclass(frozen=True)
class RLConfig(LossConfig):
    """The whole objective: a LossConfig, and the two steps before it."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rewards to advantages."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Rollout against trainer."""


def check_sampling(
    config: CorrectionConfig, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> bool:
    """Whether the sampling settings truncate the distribution, once it is sure that one may train on them.

    Args:
        config: its `truncated_sampling` says whether truncation is allowed.
        temperature: softmax temperature of the rollout, above 0 for training.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: 0 keeps all tokens.

    Raises:
        UserError: greedy sampling, or truncated sampling with `truncated_sampling = "refuse"`.
    """
    if not temperature > 0:
        raise UserError(f"rollout.temperature: {temperature!r} is greedy; training needs a temperature above 0")
    settings = {"top_k": (top_k, top_k > 0), "top_p": (top_p, top_p < 1), "min_p": (min_p, min_p > 0)}
    active = [f"{name} = {value}" for name, (value, truncates) in settings.items() if truncates]
    if active and config.truncated_sampling == "refuse":
        raise UserError(
            f"rollout: {', '.join(active)} truncates the distribution that is trained on; turn it off, or set "
            'rl.correction.truncated_sampling to "behaviour" (correct the truncation) or "policy" (leave its bias)'
        )
    return bool(active)


def _report(*faults: str | None) -> None:
    found = [fault for fault in faults if fault]
    if found:
        raise UserError("\n".join(found))


def _one_of(key: str, value: Any, choices: Any) -> str | None:
    allowed = get_args(choices)
    return None if value in allowed else f"{key}: {value!r} is none of {', '.join(map(repr, allowed))}"


def _above(key: str, value: Any, bound: float, at_most: float = math.inf) -> str | None:
    limit = "" if at_most == math.inf else f" and at most {at_most:g}"
    within = _is_number(value) and bound < value <= at_most
    return None if within else f"{key}: {value!r} must be a number above {bound:g}{limit}"


def _at_least(key: str, value: Any, bound: float) -> str | None:
    return None if _is_number(value) and value >= bound else f"{key}: {value!r} must be a number of at least {bound:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["AdvantageConfig", "CorrectionConfig", "LossConfig", "RLConfig", "check_sampling"]

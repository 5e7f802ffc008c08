"""Settings of the rollout correction: named presets, what they fill in, and rejection criteria.

`method` names a preset, which fills every field that is left unset; a field that is set by hand
goes before it. So `method = "icepop"` with `max_weight = 2` is IcePop with another bound, and
`method = "none"` with the fields that one wants is a correction without a name.

A preset is a row of changes to `PLAIN`. The rows that start with verl_ and nemo_ carry the defaults
of those projects under the names that their users know, and their quirks as plain fields:

    verl    log-ratios are clamped to +-20 before exp (overflow = "clamp"); k1 bounds act on
            pi_rollout / pi_train, although they are documented for its inverse (inverse_k1); in
            bypass mode rejected tokens still count in the denominator, because it is taken before
            they are known
    nemo    a ratio that overflows float32, or is NaN, becomes weight 0 (overflow = "zero"); a
            rejected sequence keeps its place in the denominator (denominator = "all"); without a
            truncation type, weights are unbounded (bounds = "keep")

verl: the factory methods of RolloutCorrectionConfig (verl/trainer/config/algorithm.py, commit
1dda039b). NeMo RL: truncated_importance_sampling_type of ClippedPGLossFn
(nemo_rl/algorithms/loss/loss_functions.py, commit 7ea279ab) with the reference bounds that its
comments name, and 2 for tis, as its FP8 runs have it.

token_mis is the token-level form of mis: weights min(rho, 2), and a token with rho outside [0.5, 2]
is out of the loss and of its denominator. IcePop differs in that: it gives such a token (outside
[0.5, 5]) weight 0 and leaves it in the denominator, so that it needs no pass over the whole batch;
`method = "icepop"` with other bounds is masking of that kind.

Where they come from: truncated importance sampling, https://fengyao.notion.site/off-policy-rl and
arXiv 2601.18150 (FP8-RL); IcePop, arXiv 2510.18855 (Ring-1T); sequence-level masking (MIS),
geometric and k3 rejection, https://richardli.xyz/rl-collapse ("When Speed Kills Stability") and
arXiv 2512.23075; KPop, https://ringtech.notion.site/kpop, by its authors' code (areal-project/AReaL
commit cbff54d6, areal/utils/functional/functional.py): weights rho without a bound, and a token
whose binary KL divergence is above 0.1 has weight 0 and stays in the denominator. The 0.1 is the
authors' post's, as prime-rl #3283 gives it; AReaL's own default is 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8rl_jax.config.schema import at_least, one_of, report, unless
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import function_faults, is_users, settle

PLAIN: dict[str, Any] = {
    "mode": "decoupled",
    "weights": "none",
    "bounds": "truncate",
    "max_weight": 2.0,
    "min_weight": 0.0,
    "overflow": "clamp",
    "batch_normalize": False,
    "reject": (),
    "inverse_k1": False,
    "denominator": "kept",
    "bypass_loss": "ratio",
}
"""Every field that a preset may fill, with the value that means "nothing is done"."""

_TOKEN = {"weights": "token"}
_SEQUENCE = {"weights": "sequence"}
_ICEPOP = {"weights": "token", "bounds": "mask", "min_weight": 0.5, "max_weight": 5.0}
_TOKEN_BOUNDS = {"reject": ("token_k1:0.5:2",)}
_PRODUCT = {"reject": ("seq_sum_k1:0.5:2",)}
_GEOMETRIC = {"reject": ("seq_mean_k1:0.999:1.001",)}
_K3 = {"reject": ("seq_mean_k3:0.01",)}
_KPOP = {
    "weights": "token",
    "bounds": "keep",
    "reject": ("token_binary_kl:0.1",),
    "denominator": "all",
}

_VERL = {"inverse_k1": True}
_BYPASS = _VERL | {"mode": "bypass", "denominator": "all"}
_REINFORCE = _BYPASS | {"bypass_loss": "reinforce"}
_NEMO = {"overflow": "zero", "denominator": "all"}

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "token_tis": _TOKEN,
    "sequence_tis": _SEQUENCE,
    "icepop": _ICEPOP,
    "mis": _SEQUENCE | _PRODUCT,
    "token_mis": _TOKEN | _TOKEN_BOUNDS,
    "geometric": _GEOMETRIC,
    "k3": _K3,
    "kpop": _KPOP,
    "verl_decoupled_token_is": _VERL | _TOKEN,
    "verl_decoupled_seq_is": _VERL | _SEQUENCE,
    "verl_decoupled_token_icepop": _VERL | _ICEPOP,
    "verl_decoupled_seq_is_rs": _VERL | _SEQUENCE | _PRODUCT,
    "verl_decoupled_geo_rs": _VERL | _GEOMETRIC,
    "verl_decoupled_geo_rs_seq_tis": _VERL | _SEQUENCE | _GEOMETRIC,
    "verl_decoupled_geo_rs_token_tis": _VERL | _TOKEN | _GEOMETRIC,
    "verl_decoupled_k3_rs": _VERL | _K3,
    "verl_decoupled_k3_rs_seq_tis": _VERL | _SEQUENCE | _K3,
    "verl_decoupled_k3_rs_token_tis": _VERL | _TOKEN | _K3,
    "verl_bypass_ppo_clip": _BYPASS,
    "verl_bypass_ppo_clip_geo_rs": _BYPASS | _GEOMETRIC,
    "verl_bypass_ppo_clip_k3_rs": _BYPASS | _K3,
    "verl_bypass_pg_is": _REINFORCE | _SEQUENCE,
    "verl_bypass_pg_token_icepop": _REINFORCE | _ICEPOP,
    "verl_bypass_pg_geo_rs": _REINFORCE | _GEOMETRIC,
    "verl_bypass_pg_geo_rs_seq_tis": _REINFORCE | _SEQUENCE | _GEOMETRIC,
    "verl_bypass_pg_geo_rs_token_tis": _REINFORCE | _TOKEN | _GEOMETRIC,
    "nemo_is": _NEMO | _TOKEN | {"bounds": "keep"},
    "nemo_tis": _NEMO | _TOKEN,
    "nemo_icepop": _NEMO | _ICEPOP,
    "nemo_seq_mask_tis": _NEMO
    | _TOKEN
    | {"bounds": "keep", "reject": ("seq_mean_k1:0.999:1.002",)},
}
"""By name, what the preset changes in PLAIN."""


_CorrectionMethod = Literal[("recipe", *PRESETS)]  # ty: ignore[invalid-type-form]: made of the rows above
_CorrectionMode = Literal["decoupled", "bypass"]
Bounds = Literal["truncate", "mask", "keep"]
_Overflow = Literal["clamp", "zero"]
_Denominator = Literal["kept", "all"]
_BypassLoss = Literal["ratio", "reinforce"]
_TruncatedSampling = Literal["refuse", "replay", "behaviour", "policy"]

WEIGHTS = ("none", "token", "sequence")
"""Built-in importance weights; rl/correction.py has the functions."""

_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
_STATISTICS = tuple(
    f"{level}_{k}"
    for level in _LEVELS
    for k in ("k1", "k2", "k3")
    if (level, k) != ("seq_max", "k1")
)
CRITERIA = (*_STATISTICS, "seq_mean_error", "token_binary_kl")
"""What a rejection criterion may look at; the table is in rl/correction.py."""


@dataclass(frozen=True)
class Criterion:
    """One parsed entry of `reject`: tokens or sequences whose statistic lies outside [low, high]
    are rejected."""

    level: str
    """token, seq_sum, seq_mean or seq_max."""
    statistic: str
    """k1, k2, k3, error or binary_kl."""
    low: float
    """Lower bound: of the ratio for k1, else minus infinity."""
    high: float
    """Upper bound: of the ratio for k1, else of the statistic."""

    @classmethod
    def parse(cls, text: str) -> Criterion:
        """Parse "seq_mean_k1:0.999:1.001" or "seq_max_k3:0.5".

        The bounds of k1 are of a ratio; one bound u stands for 1/u and u.

        Raises:
            UserError: an unknown statistic, a wrong number of bounds, or bounds that are no
                positive numbers in order.
        """
        name, *words = text.split(":") if isinstance(text, str) else [repr(text)]
        if name not in CRITERIA:
            raise UserError(f"rl.correction.reject: {name!r} is none of {', '.join(CRITERIA)}")
        level = next(level for level in _LEVELS if name.startswith(f"{level}_"))
        statistic = name.removeprefix(f"{level}_")
        try:
            bounds = [float(word) for word in words]
        except ValueError:
            bounds = []
        wanted = (1, 2) if statistic == "k1" else (1,)
        if (
            len(bounds) not in wanted
            or not all(0 < bound < math.inf for bound in bounds)
            or bounds != sorted(bounds)
        ):
            form = "low:high, or one bound u for 1/u and u" if statistic == "k1" else "one bound"
            raise UserError(
                f'rl.correction.reject: "{text}" needs {form} above 0, as in '
                f'"{name}:{_EXAMPLE[statistic]}"'
            )
        if statistic != "k1":
            return cls(level, statistic, -math.inf, bounds[0])
        low, high = sorted((1 / bounds[0], bounds[0])) if len(bounds) == 1 else bounds
        return cls(level, statistic, low, high)


_EXAMPLE = {"k1": "0.5:2", "k2": "0.5", "k3": "0.01", "error": "2", "binary_kl": "0.1"}


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about a rollout policy that is not quite the trainer's: other formats, other
    kernels, older weights.

    rho is pi_old / pi_rollout of a sampled token (in bypass mode pi_theta / pi_rollout), rho of a
    sequence their product.
    """

    method: _CorrectionMethod = "recipe"
    """The preset that fills what is unset below. recipe: as the precision recipe says. none:
    nothing. token_tis: token weights min(rho, 2). sequence_tis, icepop, mis, token_mis, geometric,
    k3, kpop, and the rows of verl and NeMo RL: config/correction.py."""
    mode: _CorrectionMode | None = None
    """decoupled: clip pi_theta / pi_old, then weight by rho. bypass: no pi_old; pi_theta /
    pi_rollout takes both parts."""
    weights: str | None = None
    """Importance weights: none, rho of each token, or rho of the sequence at each of its tokens
    ("sequence"). Or a function of your own, `module:function` or `path/to/file.py:function`, whose
    values bounds then act on: docs/objectives.md."""
    weights_args: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of a function of your own."""
    bounds: Bounds | None = None
    """What happens to a weight outside [min_weight, max_weight]. truncate: set to the bound (TIS).
    mask: set to 0, and the token stays in the denominator (IcePop). keep: nothing."""
    max_weight: float | None = None
    """Upper bound C of a weight; 2 unless the preset has another. Usual: 1.5 to 5 (token), 2 to 10
    (sequence)."""
    min_weight: float | None = None
    """Lower bound of a weight; 0 unless the preset has another."""
    overflow: _Overflow | None = None
    """clamp: log-ratios are clamped to +-20 before exp (verl). zero: a ratio that is not finite has
    weight 0 (NeMo RL)."""
    batch_normalize: bool | None = None
    """Divide the weights by their mean over the batch (its tokens, or its sequences), after the
    bounds."""
    reject: tuple[str, ...] | None = None
    """Criteria that a token or sequence must all pass, such as "seq_mean_k1:0.999:1.001"
    (geometric), "seq_mean_k3:0.01", "seq_max_k3:0.5" (veto by maximum), "token_k1:0.5:2",
    "token_binary_kl:0.1" (KPop); the statistics: rl/correction.py."""
    inverse_k1: bool | None = None
    """k1 bounds are on pi_rollout / pi_train (verl's code) and not on pi_train / pi_rollout:
    another test where they are not reciprocal."""
    denominator: _Denominator | None = None
    """kept: the loss divides by what was not rejected. all: by everything; a rejected token counts
    with weight 0."""
    bypass_loss: _BypassLoss | None = None
    """In bypass mode. ratio: `rl.objective` of pi_theta / pi_rollout, no weights. reinforce:
    -weight * A * log pi_theta."""
    truncated_sampling: _TruncatedSampling = "refuse"
    """May top-k, top-p, min-p, bad words or a logit bias be on in training, and what do ratios then
    correct? refuse: an error. replay: the sampler keeps which tokens were left of each one's
    distribution, its support, and the trainer renormalizes over the same (DeepSeek-V3.2,
    arXiv 2512.02556; rollout.support_size), so they correct the numerics, and no bias is left; not
    with a logit bias. behaviour: they divide by the distribution that was sampled, so they
    correct the difference, inside its support, and the numerics; where it was truncated, their mean
    falls below 1. policy: they divide by the full-vocabulary distribution at the same temperature,
    so they correct the numerics alone, and the bias of the difference stays."""

    def __post_init__(self) -> None:
        settle(self, "weights", "weights_args")
        report(
            one_of("rl.correction.method", self.method, _CorrectionMethod),
            one_of("rl.correction.truncated_sampling", self.truncated_sampling, _TruncatedSampling),
        )
        choices = {
            "mode": _CorrectionMode,
            "bounds": Bounds,
            "overflow": _Overflow,
            "denominator": _Denominator,
            "bypass_loss": _BypassLoss,
            "batch_normalize": (True, False),
            "inverse_k1": (True, False),
        }
        report(
            *(
                one_of(f"rl.correction.{name}", self.value(name), allowed)
                for name, allowed in choices.items()
            ),
            *function_faults(
                "rl.correction.weights",
                self.weights,
                WEIGHTS,
                "rl.correction.weights_args",
                self.weights_args,
            ),
            at_least("rl.correction.max_weight", self.value("max_weight"), 1.0),
            at_least("rl.correction.min_weight", self.value("min_weight"), 0.0),
        )
        rejecting = bool(self.criteria())
        report(
            unless(
                self.value("min_weight") <= self.value("max_weight"),
                f"rl.correction.min_weight: {self.value('min_weight')} is above max_weight = "
                f"{self.value('max_weight')}",
            ),
            unless(
                self.method == "recipe"
                or not self.value("batch_normalize")
                or self.value("weights") != "none",
                "rl.correction.batch_normalize: there are no weights to normalize; set "
                "rl.correction.weights",
            ),
        )
        if self.value("mode") == "bypass":
            report(
                unless(
                    not (is_users(self.weights) and self.value("bypass_loss") == "ratio"),
                    'rl.correction.weights: mode "bypass" with bypass_loss "ratio" has no '
                    "weights; take your function out, or "
                    'set rl.correction.mode to "decoupled"',
                ),
                unless(
                    not (rejecting and self.value("denominator") == "kept"),
                    'rl.correction.denominator: "kept" cannot be accumulated over micro-batches '
                    "in bypass mode: rejection "
                    "looks at the present policy, so what is kept in the whole batch is not "
                    "known before its last "
                    'micro-batch; set rl.correction.denominator to "all", or rl.correction.mode '
                    'to "decoupled"',
                ),
                unless(
                    not self.value("batch_normalize"),
                    "rl.correction.batch_normalize: cannot be accumulated over micro-batches in "
                    "bypass mode: weights are of "
                    "the present policy, so their mean over the whole batch is not known before "
                    "its last micro-batch; turn "
                    'it off, or set rl.correction.mode to "decoupled"',
                ),
            )

    def value(self, name: str) -> Any:
        """Return a field as it is set, or as the preset fills it."""
        own = getattr(self, name)
        return own if own is not None else (PLAIN | PRESETS.get(self.method, {}))[name]

    def criteria(self) -> tuple[Criterion, ...]:
        """Parse `reject`; raises UserError."""
        return tuple(Criterion.parse(text) for text in self.value("reject"))

    def filled(self) -> CorrectionConfig:
        """Return this config with every field set.

        Raises:
            UserError: the method is still "recipe", so that there is nothing to fill it from.
        """
        if self.method == "recipe":
            raise UserError(
                'rl.correction.method: "recipe" has a meaning in a run only, which has a '
                "precision recipe; name a method, "
                'such as CorrectionConfig("token_tis") or CorrectionConfig("none")'
            )
        return replace(self, **{name: self.value(name) for name in PLAIN})

    def resolve(self, recipe_method: str) -> CorrectionConfig:
        """Replace the method "recipe" by the precision recipe's own, and set every field."""
        return (replace(self, method=recipe_method) if self.method == "recipe" else self).filled()

    @property
    def whole_batch(self) -> list[str]:
        """Why the correction needs the old log-probabilities of the whole batch before its update;
        empty if it does not.

        What a micro-batch sees of itself is enough for weights, and for rejection with denominator
        = "all". A mean of the weights, and a denominator that rejection changes, belong to the
        batch: they are computed from old log-probabilities, in a forward pass before the update.
        Where that pass is skipped, they are refused.
        """
        if self.value("mode") == "bypass":
            return []
        reasons = []
        if self.value("batch_normalize") and self.value("weights") != "none":
            reasons.append(
                "rl.correction.batch_normalize divides by the mean weight of the whole batch "
                "(set it to false to do without)"
            )
        if self.value("reject") and self.value("denominator") == "kept":
            reasons.append(
                "rl.correction.reject changes how many tokens the whole batch divides by (set "
                "rl.correction.denominator to "
                '"all" to keep their number)'
            )
        return reasons

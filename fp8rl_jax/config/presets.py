"""Named rollout corrections: what `rl.correction.method` may say, and what each name fills in.

A preset is a row of changes to `PLAIN`, and any field of `[rl.correction]` that is set by hand goes
before it. The rows that start with verl_ and nemo_ carry the defaults of those projects under the
names that their users know, and their quirks as plain fields:

    verl    log-ratios are clamped to +-20 before exp (overflow = "clamp"); k1 bounds act on
            pi_rollout / pi_train,
            although they are documented for its inverse (inverse_k1); in bypass mode rejected
            tokens still count in the denominator, because it is taken before they are known
    nemo    a ratio that overflows float32, or is NaN, becomes weight 0 (overflow = "zero"); a
            rejected sequence keeps its
            place in the denominator (denominator = "all"); without a truncation type, weights are
            unbounded (bounds = "keep")

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
arXiv 2512.23075.
"""

from __future__ import annotations

from typing import Any

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

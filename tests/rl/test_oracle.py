"""Corrections, losses and advantages against what verl's and NeMo RL's own code answered on the
same inputs (oracle.json).

Both sides compute in float32; they agree to 1e-6, relative or absolute.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl.oracle_inputs import SAMPLES_PER_PROMPT, oracle_inputs

from fp8rl_jax import rl

ORACLE = json.loads((Path(__file__).parent / "oracle.json").read_text())
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
VERL_CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
NEMO_CLIP = {"clip_low": 0.2, "clip_high": 0.28}

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
inputs_named = cache(oracle_inputs)


def verl(**changes):
    return rl.CorrectionConfig(method="none", inverse_k1=True, **changes)


VERL_CUSTOM = {
    "token_normalized": verl(weights="token", batch_normalize=True),
    "sequence_normalized": verl(weights="sequence", batch_normalize=True),
    "icepop_normalized": verl(
        weights="token", bounds="mask", min_weight=0.5, max_weight=5.0, batch_normalize=True
    ),
    "sequence_icepop": verl(weights="sequence", bounds="mask", min_weight=0.5, max_weight=2.0),
    "token_k1": verl(reject=("token_k1:0.6:1.3",)),
    "token_k1_single": verl(reject=("token_k1:1.2",)),
    "token_k2": verl(reject=("token_k2:0.02",)),
    "token_k3": verl(reject=("token_k3:0.02",)),
    "seq_sum_k1": verl(reject=("seq_sum_k1:0.7:1.9",)),
    "seq_sum_k2": verl(reject=("seq_sum_k2:0.05",)),
    "seq_sum_k3": verl(reject=("seq_sum_k3:0.1",)),
    "seq_mean_k1": verl(reject=("seq_mean_k1:0.93:1.1",)),
    "seq_mean_k2": verl(reject=("seq_mean_k2:0.01",)),
    "seq_max_k2": verl(reject=("seq_max_k2:0.3",)),
    "seq_max_k3": verl(reject=("seq_max_k3:0.02",)),
    "several": verl(
        weights="token",
        max_weight=1.5,
        batch_normalize=True,
        reject=("token_k1:0.5:2", "seq_max_k3:0.98"),
    ),
}


def loss_inputs(data, mask, config, logprobs="current", **changes):
    inputs = rl.LossInputs(
        logprobs=jnp.asarray(data[logprobs]),
        advantages=jnp.asarray(data["advantages"]),
        mask=jnp.asarray(mask),
        denominator=rl.loss_denominator(jnp.asarray(mask), config),
        old_logprobs=jnp.asarray(data["old"]),
    )
    return dataclasses.replace(inputs, **changes)


@partial(jax.jit, static_argnums=1)
def loss_and_grads(inputs, config):
    return jax.value_and_grad(
        lambda x: rl.policy_loss(dataclasses.replace(inputs, logprobs=x), config)[0]
    )(inputs.logprobs)


@partial(jax.jit, static_argnums=2)
def corrected(inputs, rollout, config):
    def loss_fn(logprobs):
        return rl.corrected_policy_loss(
            dataclasses.replace(inputs, logprobs=logprobs), rollout, config
        )

    return jax.value_and_grad(loss_fn, has_aux=True)(inputs.logprobs)


def expect(found, wanted, mask):
    loss, grads = found
    close(loss, wanted["loss"])
    if "grad" in wanted:
        close(np.asarray(grads)[mask], wanted["grad"])
    assert not np.asarray(grads)[~mask].any()


@pytest.mark.parametrize("name", ORACLE["verl_correction"])
def test_verl_correction(name):
    wanted = ORACLE["verl_correction"][name]
    inputs, method = name.split("/")
    data = inputs_named(inputs)
    mask = data["mask"]
    config = VERL_CUSTOM[method] if method in VERL_CUSTOM else rl.CorrectionConfig(method=method)
    weights, kept, metrics = jax.jit(rl.correction, static_argnums=2)(
        jnp.asarray(data["old"] - data["rollout"]), jnp.asarray(mask), config
    )
    np.testing.assert_array_equal(np.asarray(kept)[mask], np.array(wanted["kept"], bool))
    raw = np.array(wanted.get("weights", np.ones(mask.sum())))
    close(np.asarray(weights)[mask], raw * wanted["kept"])
    for ours, value in rl.metric_values(metrics).items():
        if (key := ours.removeprefix("correction/")) in wanted:
            close(value, wanted[key], err_msg=key)
    if "loss" not in wanted:
        assert not np.asarray(kept).any()
        return
    for aggregation in AGGREGATIONS:
        settings = rl.LossConfig(**VERL_CLIP, aggregation=aggregation)
        loss, grads = loss_and_grads(loss_inputs(data, kept, settings, weights=weights), settings)
        close(loss, wanted["loss"][aggregation], err_msg=aggregation)
        if aggregation in wanted.get("grad", {}):
            close(np.asarray(grads)[mask], wanted["grad"][aggregation])


def test_all_decoupled_presets_of_verl_were_asked():
    from fp8rl_jax.config.correction import PRESETS

    asked = {name.split("/")[1] for name in ORACLE["verl_correction"]}
    asked |= {name.split("/")[0] for name in ORACLE["verl_loss"]} | {
        name.split("/")[-1] for name in ORACLE["nemo_loss"]
    }
    assert {name for name in PRESETS if name.startswith(("verl_", "nemo_"))} <= asked


@pytest.mark.parametrize("name", ORACLE["verl_loss"])
def test_verl_loss(name):
    data = inputs_named("plain")
    mask, wanted = data["mask"], ORACLE["verl_loss"][name]
    kind, _, rest = name.partition("/")
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    if kind.startswith("verl_bypass"):
        config = rl.RLConfig(**clip, dual_clip=1.3, correction=rl.CorrectionConfig(method=kind))
        inputs = loss_inputs(data, mask, config, logprobs=rest, old_logprobs=None)
        (loss, _), grads = corrected(inputs, jnp.asarray(data["rollout"]), config)
        return expect((loss, grads), wanted, mask)
    match kind:
        case "clip":
            config = rl.LossConfig(**clip, dual_clip=1.3, aggregation=rest)
        case "gspo":
            config = rl.LossConfig(
                ratio="sequence", clip_low=0.05, clip_high=0.08, aggregation=rest
            )
        case "fixed_length_5":
            config = rl.LossConfig(
                **clip, dual_clip=1.3, aggregation="fixed_length", fixed_length=5
            )
        case _:
            config = rl.LossConfig(**clip, objective=kind, aggregation=rest)
    expect(loss_and_grads(loss_inputs(data, mask, config), config), wanted, mask)


@pytest.mark.parametrize("name", ORACLE["verl_kl"])
def test_verl_kl(name):
    data = inputs_named("plain")
    config = rl.LossConfig(
        kl_estimator=name.rstrip("+"), kl_gradient="k2" if name.endswith("+") else "estimator"
    )

    def loss_fn(logprobs):
        kl = rl.kl_penalty(
            logprobs, jnp.asarray(data["reference"]), jnp.asarray(data["mask"]), config
        )
        return rl.aggregate(kl, jnp.asarray(data["mask"]), config).value

    found = jax.jit(jax.value_and_grad(loss_fn))(jnp.asarray(data["current"]))
    expect(found, ORACLE["verl_kl"][name], data["mask"])


def nemo(**changes):
    return rl.CorrectionConfig(method="none", overflow="zero", **changes)


GSPO = {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.08, "aggregation": "sequence_mean"}
NEMO = {
    "tis_floor": (NEMO_CLIP, nemo(weights="token", min_weight=0.8, max_weight=1.5)),
    "sequence_level": (
        NEMO_CLIP | {"aggregation": "sequence_mean"},
        rl.CorrectionConfig(method="nemo_is"),
    ),
    "seq_mask_tis_sequence_mean": (
        NEMO_CLIP | {"aggregation": "sequence_mean"},
        rl.CorrectionConfig(method="nemo_seq_mask_tis"),
    ),
    "gspo": (GSPO, nemo()),
    "gspo_is": (GSPO, nemo(weights="sequence", bounds="keep")),
    "gspo_tis": (GSPO, nemo(weights="sequence", max_weight=1.2)),
    "cispo": ({"objective": "cispo", "clip_low": 1.0, "clip_high": 0.28}, nemo()),
    "reinforce": ({"objective": "reinforce"}, nemo()),
    "dual_clip": ({"dual_clip": 1.3}, nemo()),
    "on_policy": ({}, nemo()),
    **{
        f"kl_{k}": ({"kl_coefficient": 0.1, "kl_estimator": k, "kl_gradient": "score"}, nemo())
        for k in ("k1", "k2", "k3")
    },
}


@pytest.mark.parametrize("name", ORACLE["nemo_loss"])
def test_nemo_loss(name):
    wanted = ORACLE["nemo_loss"][name]
    inputs, _, method = name.rpartition("/")
    data = inputs_named(inputs or "plain")
    settings, correction = (
        NEMO[method] if method in NEMO else (NEMO_CLIP, rl.CorrectionConfig(method=method))
    )
    config = rl.RLConfig(**settings, correction=correction)
    changes = (
        {"reference_logprobs": jnp.asarray(data["reference"])} if config.kl_coefficient else {}
    )
    if method == "on_policy":
        changes["old_logprobs"] = None
    inputs = loss_inputs(data, data["mask"], config, **changes)
    (loss, metrics), grads = corrected(inputs, jnp.asarray(data["rollout"]), config)
    expect((loss, grads), wanted, data["mask"])
    values = rl.metric_values(metrics)
    if method.startswith(("nemo_is", "nemo_tis")):
        applied = values["correction/weight_mean"]
        close(applied, wanted["sampling_importance_ratio"])
    if method in ("nemo_tis", "nemo_icepop"):
        close(values["correction/clip_frac"], wanted["is_oob_ratio"])
    if method == "nemo_seq_mask_tis":
        close(values["correction/reject_seq_frac"], wanted["is_oob_ratio"])


@pytest.mark.parametrize("threshold", [1.05, 1.2])
def test_nemo_sequence_error_threshold(threshold):
    data = inputs_named("plain")
    config = nemo(reject=(f"seq_mean_error:{threshold}",))
    kept = rl.kept_tokens(
        jnp.asarray(data["old"] - data["rollout"]), jnp.asarray(data["mask"]), config
    )
    wanted = np.array(ORACLE["nemo_other"][f"seq_mean_error:{threshold}"], bool)
    assert 0 < wanted.sum() < len(wanted)
    np.testing.assert_array_equal(kept, data["mask"] & wanted[:, None])


def test_nemo_overlong_penalty():
    lengths = jnp.asarray(inputs_named("plain")["mask"].sum(axis=1))
    close(rl.overlong_penalty(lengths, 8, 4, 0.5), ORACLE["nemo_other"]["overlong"])


@pytest.mark.parametrize(("project", "ddof"), [("verl", 1), ("nemo", 0)])
@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_oracle_advantages(project, ddof, estimator):
    wanted = ORACLE[f"{project}_advantages"].get(estimator)
    if wanted is None:
        return
    ddof = 1 if estimator == "grpo" else ddof
    epsilon = 1e-6 if estimator == "grpo" else 1e-8
    data = inputs_named("plain")
    lengths = jnp.maximum(jnp.asarray(data["mask"].sum(axis=1)), 1)
    config = rl.AdvantageConfig(estimator=estimator, ddof=ddof, epsilon=epsilon)
    close(
        rl.group_advantages(
            jnp.asarray(data["rewards"]), SAMPLES_PER_PROMPT, config, lengths=lengths
        ),
        wanted,
    )

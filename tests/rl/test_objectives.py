"""Every objective, ratio, KL term and aggregation, against the formula in float64, and their sums
over micro-batches."""

from __future__ import annotations

import dataclasses
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError

CONFIGS = {
    "dapo": rl.LossConfig(clip_high=0.28, dual_clip=10.0),
    "gspo": rl.LossConfig(
        ratio="sequence", clip_low=0.05, clip_high=0.08, aggregation="sequence_mean"
    ),
    "cispo": rl.LossConfig(objective="cispo", clip_low=1.0, clip_high=0.28),
    "reinforce": rl.LossConfig(objective="reinforce", aggregation="sequence_sum"),
    "dr_grpo": rl.LossConfig(aggregation="fixed_length"),
    "fixed_length": rl.LossConfig(aggregation="fixed_length", fixed_length=7),
    "grpo": rl.LossConfig(aggregation="sequence_mean", kl_coefficient=0.04),
    "k1": rl.LossConfig(kl_coefficient=0.1, kl_estimator="k1", kl_gradient="k2"),
    "k2": rl.LossConfig(kl_coefficient=0.1, kl_estimator="k2"),
    "score": rl.LossConfig(kl_coefficient=0.1, kl_gradient="score"),
    "entropy": rl.LossConfig(entropy_coefficient=0.3, aggregation="sequence_mean"),
    "p3o": rl.LossConfig(objective="p3o"),
    "token_sum": rl.LossConfig(aggregation="token_sum"),
}


def effective_part(batch):
    """E of P3O in float64, as calculate_ess of FeynRL-project/FeynRL (commit 4f7eafe0,
    algs/P3O/p3o.py) has it."""
    ratio = np.exp(batch["logprobs"].astype(np.float64) - batch["old"])[batch["mask"]]
    return ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)


def reference_loss(batch, config):
    """Loss of a batch in float64: the formulas of the papers, completion by completion."""
    totals, count, tokens, effective = [], 0, 0, effective_part(batch)
    for b, keep in enumerate(batch["mask"]):
        if not keep.any():
            continue
        new, old, ref = (
            batch[name][b][keep].astype(np.float64) for name in ("logprobs", "old", "reference")
        )
        advantage, count, tokens = float(batch["advantages"][b]), count + 1, tokens + keep.sum()
        ratio = np.exp(
            np.full_like(new, (new - old).mean()) if config.ratio == "sequence" else new - old
        )
        bounded = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
        loss = {
            "clip": np.maximum(-advantage * ratio, -advantage * bounded),
            "cispo": -advantage * bounded * new,
            "reinforce": -advantage * new,
            "p3o": -advantage * np.minimum(ratio, effective) * new
            + (1 - effective) * (new - old + np.exp(old - new) - 1),
        }[config.objective]
        if config.dual_clip and advantage < 0:
            loss = np.minimum(loss, -config.dual_clip * advantage)
        x = ref - new
        kl = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - 1 - x}[config.kl_estimator]
        loss = (
            loss
            + config.kl_coefficient * kl
            - config.entropy_coefficient * batch["entropy"][b][keep]
        )
        totals.append(loss.mean() if config.aggregation == "sequence_mean" else loss.sum())
    width = batch["mask"].shape[1] if config.fixed_length is None else config.fixed_length
    parts = {"token_mean": tokens, "fixed_length": count * width, "token_sum": 1}
    return sum(totals) / parts.get(config.aggregation, count)


def make_inputs(batch, config, **changes):
    mask = jnp.asarray(batch["mask"])
    inputs = rl.LossInputs(
        logprobs=jnp.asarray(batch["logprobs"]),
        advantages=jnp.asarray(batch["advantages"]),
        mask=mask,
        denominator=rl.loss_denominator(mask, config),
        old_logprobs=jnp.asarray(batch["old"]),
        reference_logprobs=jnp.asarray(batch["reference"]),
        entropy=jnp.asarray(batch["entropy"]),
    )
    return dataclasses.replace(inputs, **changes)


@partial(jax.jit, static_argnums=1)
def loss_and_grads(inputs, config):
    return jax.value_and_grad(
        lambda x: rl.policy_loss(dataclasses.replace(inputs, logprobs=x), config), has_aux=True
    )(inputs.logprobs)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_matches_float64(make_batch, spoil_padding, name):
    batch, config = make_batch(4), CONFIGS[name]
    names = ("logprobs", "old", "reference", "entropy")
    spoiled = batch | {key: spoil_padding(batch[key], batch["mask"]) for key in names}
    (loss, metrics), grads = loss_and_grads(make_inputs(spoiled, config), config)
    expected = reference_loss(batch, config)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    # what is reported of a sum is a mean
    each = batch["mask"].sum() if config.aggregation == "token_sum" else 1
    np.testing.assert_allclose(rl.metric_values(metrics)["loss"], expected / each, rtol=2e-5)
    np.testing.assert_array_equal(np.asarray(grads)[~batch["mask"]], 0)


CONSTANTS = ("cispo", "k1", "p3o", "score")
"""Whose gradient is not the derivative of their value."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in CONSTANTS])
def test_the_gradient_is_the_derivative_of_the_float64_loss(make_batch, name):
    batch, config = make_batch(4, rows=4, width=5), CONFIGS[name]
    _, grads = loss_and_grads(make_inputs(batch, config), config)
    for b, t in np.ndindex(batch["mask"].shape):
        sides = []
        for sign in (1, -1):
            moved = batch["logprobs"].astype(np.float64)
            moved[b, t] += sign * 1e-6
            sides.append(reference_loss(batch | {"logprobs": moved}, config))
        np.testing.assert_allclose(grads[b, t], (sides[0] - sides[1]) / 2e-6, rtol=2e-3, atol=1e-6)


def test_cispo_never_loses_a_gradient(make_batch):
    batch, config = make_batch(1, spread=1.0), rl.LossConfig(objective="cispo", clip_high=0.28)
    (_, metrics), grads = loss_and_grads(make_inputs(batch, config), config)
    ratio = np.exp(batch["logprobs"].astype(np.float64) - batch["old"])
    weight = np.clip(ratio, 0.8, 1.28)
    expected = (
        np.where(batch["mask"], -batch["advantages"][:, None] * weight, 0) / batch["mask"].sum()
    )
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-8)
    outside = (weight != ratio)[batch["mask"]].mean()
    np.testing.assert_allclose(
        rl.metric_values(metrics)["clip_ratio/region_mean"], outside, rtol=1e-5
    )


def test_p3o_cuts_weights_and_pulls_back_by_what_the_sample_lacks(make_batch):
    batch, config = make_batch(1, spread=1.0), CONFIGS["p3o"]
    (_, metrics), grads = loss_and_grads(make_inputs(batch, config), config)
    log_ratio, part = batch["logprobs"].astype(np.float64) - batch["old"], effective_part(batch)
    ratio, mask = np.exp(log_ratio), batch["mask"]
    assert 0.1 < part < 0.9
    weighed = -batch["advantages"][:, None] * np.minimum(ratio, part)
    expected = weighed + (1 - part) * (1 - 1 / ratio)
    np.testing.assert_allclose(
        grads, np.where(mask, expected, 0) / mask.sum(), rtol=1e-4, atol=1e-8
    )
    values = rl.metric_values(metrics)
    np.testing.assert_allclose(values["objective/ess"], part, rtol=1e-5)
    np.testing.assert_allclose(
        values["clip_ratio/high_mean"], (ratio[mask] > part).mean(), rtol=1e-5
    )
    # FeynRL's compute_kl_distance holds its exponent in +-10, and not what stands before it
    far = batch | {"logprobs": batch["logprobs"].copy(), "advantages": np.zeros(8, np.float32)}
    b, t = np.argwhere(mask)[0]
    far["logprobs"][b, t] = batch["old"][b, t] - 12
    (loss, _), grads = loss_and_grads(make_inputs(far, config), config)
    x, part = far["logprobs"].astype(np.float64) - batch["old"], effective_part(far)
    divergence = x + np.exp(np.clip(-x, -10, 10)) - 1
    np.testing.assert_allclose(loss, (1 - part) * divergence[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(grads[b, t], (1 - part) / mask.sum(), rtol=1e-4)
    # of the policy that sampled itself, REINFORCE is left
    (loss, _), grads = loss_and_grads(
        make_inputs(batch, config, old_logprobs=jnp.asarray(batch["logprobs"])), config
    )
    plain = rl.LossConfig(objective="reinforce")
    (same, _), wanted = loss_and_grads(make_inputs(batch, plain), plain)
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    np.testing.assert_allclose(grads, wanted, rtol=1e-6)


def test_token_sum_is_verls():
    """test_token_sum_masks_tokens_and_scales_for_dp of verl-project/verl (commit 1dda039b,
    tests/trainer/ppo/test_loss_aggregation_on_cpu.py), of one rank."""
    values = jnp.array([[1.0, 2.0, 30.0], [4.0, 50.0, 6.0]])
    mask, config = jnp.array([[True, True, False], [True, False, True]]), CONFIGS["token_sum"]
    total = rl.aggregate(values, mask, config).numerator / rl.loss_denominator(mask, config)
    assert total == 13.0


def test_gspo_clips_whole_sequences(make_batch):
    batch, config = make_batch(4, spread=0.4), CONFIGS["gspo"]
    _, grads = loss_and_grads(make_inputs(batch, config), config)
    moved = np.asarray(grads) != 0
    rows = batch["mask"].any(1)
    assert ((moved == batch["mask"]) | ~moved.any(1, keepdims=True))[rows].all()
    assert 0 < moved.any(1).sum() < rows.sum()


KL = [(k, how) for k in ("k1", "k2", "k3") for how in ("k2", "score")]


@pytest.mark.parametrize(("estimator", "gradient"), KL)
def test_kl_gradients_are_those_of_the_divergence(estimator, gradient):
    """The mean over the policy's own samples, computed by summing over the vocabulary."""
    rng = np.random.default_rng(0)
    logits, reference = (
        jnp.asarray(rng.normal(size=7), jnp.float32),
        jax.nn.log_softmax(rng.normal(size=7)),
    )
    config = rl.LossConfig(kl_estimator=estimator, kl_gradient=gradient)

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - reference)).sum()

    def estimated(logits):
        logp = jax.nn.log_softmax(logits)
        kl = rl.kl_penalty(logp[None], reference[None], jnp.ones((1, 7), bool), config)[0]
        return (jax.lax.stop_gradient(jnp.exp(logp)) * kl).sum()

    value = jax.value_and_grad(estimated)(logits)
    if estimator != "k2":
        np.testing.assert_allclose(value[0], divergence(logits), rtol=1e-5)
    if (estimator, gradient) != ("k2", "score"):
        np.testing.assert_allclose(value[1], jax.grad(divergence)(logits), rtol=1e-4, atol=1e-6)


def test_the_entropy_bonus_needs_and_trains_the_entropy(make_batch):
    batch, config = make_batch(), CONFIGS["entropy"]
    with pytest.raises(ValueError, match="rl.entropy_coefficient"):
        rl.policy_loss(make_inputs(batch, config, entropy=None), config)
    inputs = make_inputs(batch, config)
    grads = jax.grad(lambda x: rl.policy_loss(dataclasses.replace(inputs, entropy=x), config)[0])(
        inputs.entropy
    )
    lengths = np.maximum(batch["mask"].sum(1, keepdims=True), 1)
    expected = np.where(batch["mask"], -0.3 / lengths, 0) / batch["mask"].any(1).sum()
    np.testing.assert_allclose(grads, expected, rtol=1e-5)


SUMS = {name: rl.CorrectionConfig(method="token_tis") for name in CONFIGS if name != "p3o"} | {
    "kpop": rl.CorrectionConfig(method="kpop"),
    "bypass": rl.CorrectionConfig(
        method="verl_bypass_pg_geo_rs_token_tis", reject=("seq_mean_k1:0.9:1.1",)
    ),
    "seq_mask": rl.CorrectionConfig(method="nemo_seq_mask_tis", reject=("seq_mean_k1:0.9:1.1",)),
}


@partial(jax.jit, static_argnums=2)
def corrected(inputs, rollout, config):
    return jax.value_and_grad(
        lambda x: rl.corrected_policy_loss(
            dataclasses.replace(inputs, logprobs=x), rollout, config
        ),
        has_aux=True,
    )(inputs.logprobs)


@pytest.mark.parametrize("name", SUMS)
def test_micro_batches_add_up_to_the_big_batch(make_batch, name):
    batch = make_batch(5)
    config = rl.RLConfig(
        **dataclasses.asdict(CONFIGS.get(name, CONFIGS["grpo"])), correction=SUMS[name]
    )
    whole, rollout = make_inputs(batch, config), jnp.asarray(batch["rollout"])
    (loss, metrics), grads = corrected(whole, rollout, config)
    parts = []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)):
        arrays = {key: x[rows] for key, x in vars(whole).items() if x is not None and x.ndim}
        parts.append(corrected(dataclasses.replace(whole, **arrays), rollout[rows], config))
    np.testing.assert_allclose(sum(part[0][0] for part in parts), loss, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        np.concatenate([part[1] for part in parts]), grads, rtol=1e-6, atol=1e-9
    )
    reduced = rl.metric_values(reduce(rl.add_metrics, [part[0][1] for part in parts]))
    for key, value in rl.metric_values(metrics).items():
        np.testing.assert_allclose(reduced[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("correction", ["geometric", "mis", "verl_decoupled_k3_rs_token_tis"])
def test_what_one_micro_batch_cannot_know_is_refused_with_the_reason(make_batch, correction):
    config = rl.RLConfig(correction=rl.CorrectionConfig(method=correction))
    batch = make_batch()
    reason = (
        "rl.correction.reject .*rl.correction.denominator .*the pass that makes them was skipped"
    )
    with pytest.raises(UserError, match=reason):
        rl.corrected_policy_loss(make_inputs(batch, config), jnp.asarray(batch["rollout"]), config)


def test_the_whole_batch_made_before_equals_one_big_micro_batch(make_batch):
    batch = make_batch(6)
    reject = ("seq_mean_k1:0.9:1.1",)
    config = rl.RLConfig(
        correction=rl.CorrectionConfig(method="token_tis", batch_normalize=True, reject=reject)
    )
    log_ratio = jnp.asarray(batch["old"] - batch["rollout"])
    weights, kept, _ = rl.correction(log_ratio, jnp.asarray(batch["mask"]), config.correction)
    denominator = rl.loss_denominator(kept, config)
    assert 0 < float(denominator) < batch["mask"].sum()
    whole = make_inputs(
        batch | {"mask": np.asarray(kept)}, config, weights=weights, denominator=denominator
    )
    (loss, _), _ = loss_and_grads(whole, config)
    arrays = {name: x for name, x in vars(whole).items() if x is not None and x.ndim}
    parts = [
        dataclasses.replace(whole, **{name: x[i : i + 2] for name, x in arrays.items()})
        for i in (0, 2, 4, 6)
    ]
    np.testing.assert_allclose(
        sum(loss_and_grads(part, config)[0][0] for part in parts), loss, rtol=1e-6, atol=1e-8
    )

from __future__ import annotations

import dataclasses
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8rl_jax import rl

FULL = rl.LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.5, kl_coefficient=0.05)


def reference_loss(batch, config, weights=None, old=None):
    """The loss and its metrics token by token, in Python floats."""
    losses, policy, kls, low, high, dual, ratios, approx = [], [], [], [], [], [], [], []
    old = batch["old"] if old is None else old
    for b, t in zip(*np.nonzero(batch["mask"]), strict=True):
        advantage = float(batch["advantages"][b])
        logp = float(batch["logprobs"][b, t])
        ratio = np.exp(np.clip(logp - float(old[b, t]), -20, 20))
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss = -min(ratio * advantage, bounded * advantage)
        if config.dual_clip is not None and advantage < 0:
            loss = min(loss, -config.dual_clip * advantage)
        loss *= 1.0 if weights is None else float(weights[b, t])
        gap = float(batch["reference"][b, t]) - logp
        kl = np.exp(gap) - gap - 1
        policy.append(loss)
        losses.append(loss + config.kl_coefficient * kl)
        kls.append(kl)
        low.append(advantage < 0 and ratio < 1 - config.clip_low)
        high.append(advantage > 0 and ratio > 1 + config.clip_high)
        dual.append(config.dual_clip is not None and advantage < 0 and ratio > config.dual_clip)
        ratios.append(ratio)
        approx.append(ratio - 1 - np.log(ratio))
    return {
        "loss": np.mean(losses),
        "policy_loss": np.mean(policy),
        "kl": np.mean(kls),
        "approx_kl": np.mean(approx),
        "ratio_max": np.max(ratios),
        "clip_ratio/low_mean": np.mean(low),
        "clip_ratio/high_mean": np.mean(high),
        "clip_ratio/region_mean": np.mean(low) + np.mean(high),
        "clip_ratio/dual_mean": np.mean(dual),
        "entropy": np.mean(batch["entropy"].astype(np.float64)[batch["mask"]]),
    }


def make_inputs(batch, config=FULL, **changes):
    mask = jnp.asarray(batch["mask"])
    inputs = rl.LossInputs(
        logprobs=jnp.asarray(batch["logprobs"]),
        advantages=jnp.asarray(batch["advantages"]),
        mask=mask,
        denominator=rl.loss_denominator(mask, config),
        old_logprobs=jnp.asarray(batch["old"]),
        weights=jnp.ones(mask.shape),
        reference_logprobs=jnp.asarray(batch["reference"]),
        entropy=jnp.asarray(batch["entropy"]),
    )
    return dataclasses.replace(inputs, **changes)


@partial(jax.jit, static_argnums=1)
def loss_and_grads(inputs, config):
    """((loss, metrics), gradient with respect to logprobs)."""
    return jax.value_and_grad(
        lambda logprobs: rl.policy_loss(dataclasses.replace(inputs, logprobs=logprobs), config),
        has_aux=True,
    )(inputs.logprobs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "config",
    [
        rl.LossConfig(),
        rl.LossConfig(clip_high=0.28, dual_clip=1.3),
        rl.LossConfig(kl_coefficient=0.1),
        FULL,
    ],
)
def test_loss_and_metrics_match_float64(make_batch, config, seed):
    batch = make_batch(seed)
    weights = np.random.default_rng(seed).uniform(0.5, 2, batch["mask"].shape).astype(np.float32)
    (loss, metrics), _ = loss_and_grads(
        make_inputs(batch, config, weights=jnp.asarray(weights)), config
    )
    expected = reference_loss(batch, config, weights)
    if config.dual_clip is None:
        expected.pop("clip_ratio/dual_mean")
    values = rl.metric_values(metrics)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=2e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(loss, expected["loss"], rtol=2e-5)


def test_every_branch_of_the_clip_is_exercised(make_batch):
    values = reference_loss(make_batch(1), FULL)
    assert min(values[f"clip_ratio/{side}_mean"] for side in ("low", "high", "dual")) > 0


@pytest.mark.parametrize("config", [rl.LossConfig(), FULL])
def test_gradient_matches_finite_differences_of_the_float64_loss(make_batch, config):
    batch = make_batch(3)
    _, grads = loss_and_grads(make_inputs(batch, config), config)
    step = 1e-6
    for b, t in np.ndindex(batch["mask"].shape):
        sides = []
        for sign in (1, -1):
            moved = batch["logprobs"].astype(np.float64)
            moved[b, t] += sign * step
            sides.append(reference_loss(batch | {"logprobs": moved}, config)["loss"])
        np.testing.assert_allclose(
            grads[b, t], (sides[0] - sides[1]) / (2 * step), rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1, 1.0, True),
        (1, 1.5, False),
        (1, 0.5, True),
        (-1, 1.0, True),
        (-1, 0.5, False),
        (-1, 1.5, True),
        (-1, 4, False),
    ],
)
def test_the_gradient_vanishes_exactly_where_the_clip_binds(advantage, ratio, moves):
    config = rl.LossConfig(dual_clip=3.0)
    mask = jnp.ones((1, 1), bool)
    logprobs = jnp.log(jnp.full((1, 1), float(ratio)))
    inputs = rl.LossInputs(
        logprobs, jnp.array([float(advantage)]), mask, jnp.array(1.0), jnp.zeros((1, 1))
    )
    _, grads = loss_and_grads(inputs, config)
    np.testing.assert_allclose(grads[0, 0], -advantage * ratio if moves else 0.0, rtol=1e-6)


def test_kl_gradient_pulls_towards_the_reference(make_batch):
    config = rl.LossConfig(kl_coefficient=0.1)
    batch = make_batch() | {"advantages": np.zeros(8, np.float32)}
    _, grads = loss_and_grads(make_inputs(batch, config), config)
    gap = batch["reference"].astype(np.float64) - batch["logprobs"]
    expected = 0.1 * np.where(batch["mask"], -np.expm1(gap), 0) / batch["mask"].sum()
    np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("float_mask", [False, True])
def test_padding_may_hold_anything(make_batch, spoil_padding, float_mask):
    batch = make_batch(2)
    mask = batch["mask"]
    batch["advantages"] = np.repeat(batch["advantages"][:, None], mask.shape[1], 1)
    names = ("logprobs", "old", "reference", "entropy", "advantages")
    spoiled = batch | {name: spoil_padding(batch[name], mask) for name in names}
    weights = np.random.default_rng(0).uniform(0.5, 2, mask.shape).astype(np.float32)

    def evaluate(batch, weights):
        inputs = make_inputs(
            batch,
            weights=jnp.asarray(weights),
            mask=jnp.asarray(mask, float if float_mask else bool),
        )
        return loss_and_grads(inputs, FULL)

    clean = evaluate(batch, weights)
    rough = evaluate(spoiled, spoil_padding(weights, mask))
    jax.tree.map(np.testing.assert_array_equal, clean, rough)
    np.testing.assert_array_equal(np.asarray(rough[1])[~mask], 0)


def test_an_empty_mask_has_zero_loss_and_gradients(make_batch):
    batch = make_batch()
    inputs = make_inputs(batch | {"mask": np.zeros_like(batch["mask"])})
    (loss, metrics), grads = loss_and_grads(inputs, FULL)
    assert loss == 0 and not np.asarray(grads).any()
    assert all(value == 0 for value in rl.metric_values(metrics).values())


def test_nan_at_a_token_makes_the_loss_nan_and_a_huge_ratio_does_not(make_batch):
    batch = make_batch()
    for bad, finite in ((np.nan, False), (-np.inf, True), (-1e4, True)):
        old = batch["old"].copy()
        old[0, 0] = bad
        inputs = make_inputs(batch | {"old": old})
        (loss, _), grads = loss_and_grads(inputs, FULL)
        assert np.isfinite(loss) == finite
        assert np.isfinite(grads).all() == finite


@partial(jax.jit, static_argnums=2)
def corrected_loss_and_grads(inputs, rollout, config):
    def loss_fn(logprobs):
        return rl.corrected_policy_loss(
            dataclasses.replace(inputs, logprobs=logprobs), rollout, config
        )

    return jax.value_and_grad(loss_fn, has_aux=True)(inputs.logprobs)


@pytest.mark.parametrize("on_policy", [False, True])
def test_micro_batches_add_up_to_the_big_batch(make_batch, on_policy):
    batch = make_batch(5)
    config = rl.RLConfig(
        **dataclasses.asdict(FULL), correction=rl.CorrectionConfig(method="token_tis")
    )
    rollout = jnp.asarray(batch["rollout"])
    whole = make_inputs(
        batch, config, weights=None, **({"old_logprobs": None} if on_policy else {})
    )
    (loss, metrics), grads = corrected_loss_and_grads(whole, rollout, config)
    expected = rl.metric_values(metrics)

    parts = []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)):
        arrays = {name: x[rows] for name, x in vars(whole).items() if x is not None and x.ndim}
        parts.append(
            corrected_loss_and_grads(dataclasses.replace(whole, **arrays), rollout[rows], config)
        )
    np.testing.assert_allclose(sum(part[0][0] for part in parts), loss, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        np.concatenate([part[1] for part in parts]), grads, rtol=1e-6, atol=1e-9
    )
    reduced = rl.metric_values(reduce(rl.add_metrics, [part[0][1] for part in parts]))
    for name, value in expected.items():
        np.testing.assert_allclose(reduced[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def tiny_policy(params, features, tokens):
    return jnp.take_along_axis(
        jax.nn.log_softmax(jnp.tanh(features @ params["a"]) @ params["b"]), tokens[..., None], -1
    )[..., 0]


@pytest.mark.parametrize("method", ["none", "token_tis"])
def test_skipping_the_old_logprob_pass_gives_the_same_update(make_batch, method):
    rng = np.random.default_rng(0)
    batch = make_batch(7, rows=6, width=9)
    features = jnp.asarray(rng.normal(size=(6, 9, 5)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 13, (6, 9)))
    params = {
        "a": jnp.asarray(rng.normal(size=(5, 8)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(8, 13)), jnp.float32),
    }
    config = rl.RLConfig(kl_coefficient=0.01, correction=rl.CorrectionConfig(method=method))
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def update(params, old_logprobs):
        def loss_fn(params):
            logprobs = tiny_policy(params, features, tokens)
            return rl.corrected_policy_loss(
                make_inputs(
                    batch, config, logprobs=logprobs, old_logprobs=old_logprobs, weights=None
                ),
                jnp.asarray(batch["rollout"]),
                config,
            )

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return loss, rl.metric_values(metrics), grads, optax.apply_updates(params, updates)

    old = jax.jit(tiny_policy)(params, features, tokens)
    explicit, skipped = update(params, old), update(params, None)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), explicit, skipped)
    assert skipped[1]["ratio_max"] == 1.0
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(skipped[2])) > 1e-3


def test_on_policy_gradient_is_the_policy_gradient(make_batch):
    batch = make_batch(4)
    inputs = make_inputs(batch, old_logprobs=None)
    (loss, _), grads = loss_and_grads(inputs, rl.LossConfig())
    expected = (
        -batch["advantages"].astype(np.float64)[:, None] * batch["mask"] / batch["mask"].sum()
    )
    np.testing.assert_allclose(grads, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, expected.sum(), rtol=1e-5)


def test_only_logprobs_carry_a_gradient(make_batch):
    batch = make_batch()
    inputs = make_inputs(batch)
    constants = ("advantages", "old_logprobs", "weights", "reference_logprobs", "entropy")
    grads = jax.jit(jax.grad(lambda x: rl.policy_loss(dataclasses.replace(inputs, **x), FULL)[0]))(
        {name: getattr(inputs, name) for name in constants}
    )
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))


def test_advantages_may_be_given_for_each_token(make_batch):
    batch = make_batch()
    expanded = batch | {
        "advantages": np.repeat(batch["advantages"][:, None], batch["mask"].shape[1], 1)
    }
    found, expected = (
        loss_and_grads(make_inputs(expanded), FULL),
        loss_and_grads(make_inputs(batch), FULL),
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


@pytest.mark.usefixtures("unchecked_shapes")
def test_missing_and_misshapen_inputs_are_named(make_batch):
    batch = make_batch()
    with pytest.raises(ValueError, match="rl.kl_coefficient"):
        rl.policy_loss(make_inputs(batch, reference_logprobs=None), FULL)
    with pytest.raises(ValueError, match="old_logprobs has shape"):
        rl.policy_loss(make_inputs(batch, old_logprobs=jnp.zeros((8, 1))), FULL)
    with pytest.raises(ValueError, match="weights unset"):
        rl.corrected_policy_loss(make_inputs(batch), jnp.asarray(batch["rollout"]), rl.RLConfig())


def test_decoupled_weights_multiply_after_clipping(make_batch):
    batch = make_batch(6)
    config = rl.RLConfig(correction=rl.CorrectionConfig(method="token_tis", max_weight=1.5))
    weights = np.minimum(np.exp(batch["old"].astype(np.float64) - batch["rollout"]), 1.5)
    inputs = make_inputs(batch, config, weights=None)
    (loss, _), grads = corrected_loss_and_grads(inputs, jnp.asarray(batch["rollout"]), config)
    np.testing.assert_allclose(loss, reference_loss(batch, config, weights)["loss"], rtol=2e-5)
    _, unweighted = loss_and_grads(make_inputs(batch), rl.LossConfig())
    np.testing.assert_allclose(grads, unweighted * weights, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("method", "has_old"), [("none", False), ("token_tis", True)])
def test_bypass_clips_against_the_rollout_without_weights(make_batch, method, has_old):
    batch = make_batch(6)
    config = rl.RLConfig(correction=rl.CorrectionConfig(method=method, mode="bypass"))
    inputs = make_inputs(batch, config, weights=None, **({} if has_old else {"old_logprobs": None}))
    (loss, metrics), grads = corrected_loss_and_grads(inputs, jnp.asarray(batch["rollout"]), config)
    np.testing.assert_allclose(
        loss, reference_loss(batch, config, old=batch["rollout"])["loss"], rtol=2e-5
    )
    assert rl.metric_values(metrics)["correction/weight_max"] == 1.0
    ratio = np.exp(batch["logprobs"].astype(np.float64) - batch["rollout"])
    advantages = np.broadcast_to(batch["advantages"][:, None], ratio.shape)
    free = ~((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8)) & batch["mask"]
    expected = np.where(free, -advantages * ratio, 0) / batch["mask"].sum()
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-9)

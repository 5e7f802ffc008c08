from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.rl.metrics import (
    check_shapes,
    k3,
    masked_max,
    masked_mean,
    masked_sum,
    per_token,
    safe_divide,
)


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_masked_reductions_ignore_rubbish_in_the_padding(make_batch, spoil_padding, dtype):
    batch = make_batch()
    mask, values = batch["mask"], batch["entropy"]
    spoiled = jnp.asarray(spoil_padding(values, mask))
    chosen = values.astype(np.float64)[mask]
    flags = jnp.asarray(mask.astype(dtype))
    np.testing.assert_allclose(masked_sum(spoiled, flags), chosen.sum(), rtol=1e-6)
    np.testing.assert_allclose(masked_mean(spoiled, flags), chosen.mean(), rtol=1e-6)
    np.testing.assert_allclose(masked_max(spoiled, flags), chosen.max())
    rows = [row[keep].mean() if keep.any() else 0.0 for row, keep in zip(values, mask, strict=True)]
    np.testing.assert_allclose(masked_mean(spoiled, flags, axis=1), rows, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_in_the_mask_reach_the_result(bad):
    values, mask = jnp.array([[1.0, bad]]), jnp.array([[True, True]])
    assert not np.isfinite(masked_mean(values, mask))
    assert not np.isfinite(masked_max(values, mask))
    assert np.isnan(safe_divide(jnp.array(1.0), jnp.array(np.nan)))


def test_nothing_counted_is_zero():
    nothing = jnp.zeros((2, 3), bool)
    values = jnp.full((2, 3), jnp.nan)
    assert rl.Mean.of(values, nothing).value == 0
    assert rl.Maximum.of(values, nothing).value == 0


def test_gradient_of_a_masked_mean_does_not_touch_the_padding():
    mask = jnp.array([[True, False], [True, True]])
    grads = jax.grad(lambda x: masked_mean(x, mask) ** 2)(jnp.array([[1.0, jnp.nan], [2.0, 6.0]]))
    np.testing.assert_allclose(grads, np.array([[2, 0], [2, 2]]), rtol=1e-6)


@pytest.mark.parametrize("x", [0.0, 1e-6, -1e-4, 1e-3, -0.05, 0.7, -3.0, 12.0])
def test_k3_keeps_its_digits(x):
    x32 = float(np.float32(x))
    exact = x32**2 / 2 + x32**3 / 6 + x32**4 / 24 if abs(x) < 1e-2 else np.expm1(x32) - x32
    np.testing.assert_allclose(k3(jnp.float32(x32)), exact, rtol=2e-3, atol=1e-12)
    np.testing.assert_allclose(jax.grad(k3)(jnp.float32(x32)), np.expm1(x32), rtol=1e-5, atol=2e-7)


def test_micro_batches_reduce_like_the_whole(make_batch):
    batch = make_batch(rows=12)
    values, mask = jnp.asarray(batch["entropy"]), jnp.asarray(batch["mask"])

    def measure(values, mask):
        return {"mean": rl.Mean.of(values, mask), "max": rl.Maximum.of(values, mask)}

    whole = rl.metric_values(measure(values, mask))
    parts = [measure(values[i : i + 3], mask[i : i + 3]) for i in range(0, 12, 3)]
    added = parts[0]
    for part in parts[1:]:
        added = rl.add_metrics(added, part)
    micro = (values.reshape(4, 3, -1), mask.reshape(4, 3, -1))
    _, stacked = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, measure(*x)), None, xs))(micro)
    for found in (rl.metric_values(added), rl.metric_values(rl.reduce_metrics(stacked))):
        np.testing.assert_allclose(found["mean"], whole["mean"], rtol=1e-6)
        np.testing.assert_allclose(found["max"], whole["max"])
    naive = np.mean([part["mean"].value for part in parts])
    assert abs(naive - whole["mean"]) > 1e-3


def test_metrics_of_different_names_do_not_add():
    one = rl.Maximum(jnp.array(1.0))
    with pytest.raises(ValueError, match="a, b"):
        rl.add_metrics({"a": one, "c": one}, {"b": one, "c": one})


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_never_broadcast_by_accident():
    mask = jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"weights has shape \(2, 1\), but the mask has \(2, 3\)"):
        check_shapes(mask, weights=jnp.ones((2, 1)))
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
        per_token(jnp.ones(3), mask)
    np.testing.assert_array_equal(per_token(jnp.array([1.0, 2.0]), mask), [[1, 1, 1], [2, 2, 2]])

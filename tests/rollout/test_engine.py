"""Weight sync, KV calibration and finite flags."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import make_engine, make_policy, make_prompts

from fp8rl_jax.config.recipe import RECIPES, PrecisionConfig, get_recipe
from fp8rl_jax.rollout.calibration import observe_qkv, scales_from_amax
from fp8rl_jax.rollout.engine import LocalEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling

FULL = RECIPES["fp8-rl"]


def test_scales_are_percentile_times_margin_over_448():
    amax = np.random.default_rng(0).uniform(1, 9, (11, 2, 3)).astype(np.float32)
    table = np.sort(amax, axis=0)
    for percentile, pick in ((99.9, 10), (50, 5), (0, 0)):
        recipe = FULL.__class__("x", FULL.rollout, kv_percentile=percentile, kv_margin=1.2)
        scales = scales_from_amax(jnp.asarray(amax), recipe)
        got = np.stack([scales.query, scales.key, scales.value], -1)
        np.testing.assert_allclose(got, table[pick] * 1.2 / 448, rtol=1e-6)


def test_zero_and_nan_amax():
    amax = jnp.ones((3, 2, 3)).at[:, 0, 1].set(0.0).at[1, 1, 2].set(jnp.nan)
    scales = scales_from_amax(amax, FULL)
    assert scales.key[0] == 1 and np.isnan(scales.value[1])
    assert np.isfinite(scales.query).all() and np.isfinite(scales.value[0])


def test_trainer_calibration_is_required_and_versions_count():
    engine = LocalEngine(FULL, jnp.float32)
    with pytest.raises(RuntimeError, match="call sync first"):
        engine.generate(make_prompts(), 1, Sampling(2), jax.random.key(0))
    with pytest.raises(ValueError, match="sync needs the KV scales"):
        engine.sync(make_policy())
    assert engine.version == 0 and make_engine("bf16").version == 1


def test_rollout_calibration_measures_the_first_batch():
    engine = LocalEngine(get_recipe("fp8-kv", PrecisionConfig(kv_calibration="rollout")), jnp.float32)
    engine.sync(make_policy())
    assert engine.scales is None
    out = engine.generate(make_prompts(), 1, Sampling(2), jax.random.key(0))
    first = jax.tree.leaves(engine.scales)
    assert out.weight_version == 1 and all((np.asarray(s) > 0).all() for s in first) and engine.finite["kv_scale"]
    engine.sync(make_policy())
    assert engine.scales is None


def test_calibration_sees_prompts_and_completions_and_no_padding():
    """As many tokens as one row of prompt and completion has, and their largest magnitudes."""
    rng, (tokens, lengths, _) = np.random.default_rng(2), make_prompts((9, 4, 1, 6), (1, 2, 3, 4))
    completions = rng.integers(1, 131, (8, 5)).astype(np.int32)
    mask = np.arange(5) < np.array([5, 1, 3, 5, 2, 4, 1, 2])[:, None]
    rows, ends = np.full((8, 14), 130, np.int32), np.repeat(lengths, 2) + mask.sum(1).astype(np.int32)
    for row, prompt in enumerate(np.repeat(np.arange(4), 2)):
        real = [*tokens[prompt, : lengths[prompt]], *completions[row, mask[row]]]
        rows[row, : len(real)] = real
    options = {"recipe": RECIPES["bf16"], "dtype": jnp.float32}
    whole = observe_qkv(make_policy(), rows, ends, **options, micro_batches=2)
    found = observe_qkv(make_policy(), tokens, lengths, completions, mask, **options, micro_batches=2)
    assert found.amax.shape == (2, 2, 3)
    np.testing.assert_allclose(found.amax, whole.amax, rtol=1e-5)
    # the prompt once for both its samples, four query heads and two of keys and of values
    counted = (lengths + mask.reshape(4, 2, 5).sum((1, 2))).reshape(2, 2).sum(1)
    np.testing.assert_array_equal(found.elements[:, 0], counted[:, None] * 32 * np.array([4, 2, 2]))


def test_finite_flags_see_one_nan_weight():
    policy = make_policy()
    assert make_engine("fp8-rollout", policy=policy).finite["weight"]
    weight = policy.layers.up_proj.weight
    weight.set_value(weight.get_value().at[1, 300, 5].set(jnp.nan))
    assert not make_engine("fp8-rollout", policy=policy).finite["weight"]


def test_pad_prompts():
    prompts = pad_prompts([[5, 6], [7]], [3, 4], 3)
    np.testing.assert_array_equal(prompts.tokens, [[5, 6, 0], [7, 0, 0]])
    for bad in ([], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="prompt 9: .* need between 1 and 3"):
            pad_prompts([bad], [9], 3)

"""KV scales of an FP8 cache: one a layer, or one a KV head."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, full_logits, log_softmax, make_policy, make_prompts, take

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.forward import forward
from fp8rl_jax.rollout.calibration import calibrate_on_prompts, observe_qkv
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext

KEY, PLAIN = jax.random.key(42), Sampling(max_new_tokens=8, temperature=0.8)
LAYER = RECIPES["fp8-kv"]
HEAD = replace(LAYER, kv_granularity="head")
HEADS, GROUP = CONFIG.num_kv_heads, CONFIG.num_heads // CONFIG.num_kv_heads


def engine_of(recipe, policy=None, scales=None, unroll=True) -> LocalEngine:
    policy, engine = (
        make_policy() if policy is None else policy,
        LocalEngine(recipe, jnp.float32, unroll),
    )
    if scales is None:
        scales = calibrate_on_prompts(policy, make_prompts(seed=5), recipe, jnp.float32)
    engine.sync(policy, SyncContext(scales=scales))
    return engine


def stacked(scales: KVScales) -> np.ndarray:
    """[layers, 3, ...]"""
    return np.stack([scales.query, scales.key, scales.value], 1)


def amax_of_heads(policy, prompts) -> np.ndarray:
    """[layers, 3, kv_heads], those of a query over the heads that share a KV head."""
    real = jnp.arange(prompts.tokens.shape[1]) < prompts.lengths[:, None]

    def observe(q, k, v, _, scales):
        sizes = [jnp.where(real[..., None, None], jnp.abs(x), 0).max((0, 1, 3)) for x in (q, k, v)]
        sizes[0] = sizes[0].reshape(HEADS, GROUP).max(1)
        return jnp.stack(sizes), scales

    tokens, segments = jnp.asarray(prompts.tokens), real.astype(jnp.int32)
    return np.asarray(forward(policy, tokens, segment_ids=segments, observe=observe).observed)


def test_scales_of_each_head_are_those_of_its_amax():
    policy, prompts = make_policy(), make_prompts(seed=5)
    amax = amax_of_heads(policy, prompts)
    heads, layers = (
        stacked(calibrate_on_prompts(policy, prompts, recipe, jnp.float32))
        for recipe in (HEAD, LAYER)
    )
    assert heads.shape == (CONFIG.num_layers, 3, HEADS) and layers.shape == (CONFIG.num_layers, 3)
    np.testing.assert_allclose(heads, amax * 1.05 / 448, rtol=1e-5)
    np.testing.assert_allclose(layers, heads.max(-1), rtol=1e-6)
    assert (np.abs(heads[..., 0] / heads[..., 1] - 1) > 1e-3).all()


@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scanned"])
def test_equal_scales_of_all_heads_give_the_bits_of_the_layer_s_scale(unroll):
    one = engine_of(LAYER, unroll=unroll)
    spread = jax.tree.map(lambda x: jnp.repeat(x[:, None], HEADS, axis=1), one.scales)
    other = engine_of(HEAD, scales=spread, unroll=unroll)
    found = [engine.generate(make_prompts(), 2, PLAIN, KEY) for engine in (one, other)]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_array_equal(found[0].policy_logprobs, found[1].policy_logprobs)


@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scanned"])
def test_decode_equals_a_full_forward_up_to_flipped_roundings(unroll):
    """The bounds of test_generate.py, whose docstring has the reasons."""
    engine = engine_of(HEAD, unroll=unroll)
    rollout = engine.generate(make_prompts(), 2, PLAIN, KEY)

    def error(by):
        expected = take(log_softmax(full_logits(by, rollout) / 0.8), rollout.tokens)
        return np.abs(expected - rollout.policy_logprobs)

    found, cost = error(engine), error(engine_of(RECIPES["bf16"]))
    assert (found < 1e-4).mean() > 0.5
    assert found.max() < cost.max() / 2 and found.mean() < cost.mean() / 10


def with_a_large_head(factor: float):
    """The same function of the tokens, in which the values of KV head 0 are larger: what o_proj
    reads of it is smaller by as much."""
    policy, dim = make_policy(), CONFIG.head_dim
    v, o = policy.layers.v_proj.weight, policy.layers.o_proj.weight
    v.set_value(v.get_value().at[:, :dim].multiply(factor))
    o.set_value(o.get_value().at[:, :, : GROUP * dim].divide(factor))
    return policy


def values_of_the_small_head(policy, recipe, scales) -> tuple[float, float]:
    """(part of the values of KV head 1 that become 0, relative error of all of them), largest of
    the layers, under a recipe's scales."""
    if scales.value.ndim == 1:
        scales = jax.tree.map(lambda x: jnp.repeat(x[:, None], HEADS, axis=1), scales)
    tokens, lengths, _ = make_prompts(seed=5)
    options = {"recipe": HEAD, "dtype": jnp.dtype("float32")}
    sums = observe_qkv(policy, tokens, lengths, scales=scales, **options)
    head = jax.tree.map(lambda x: np.asarray(x)[0, :, 2, 1], sums)
    noise = np.sqrt(head.noise / head.signal)
    return float((head.underflowed / head.elements).max()), float(noise.max())


def test_a_head_with_large_values_does_not_spoil_the_others():
    """Under one scale a factor of 100 makes small values of the other head 0, which costs little,
    as e4m3 has 15 binades of full precision, and one of 2^20 all of them; under scales of their own
    nothing changes."""
    found, error = {}, {}
    for factor in (1.0, 100.0, 2.0**20):
        policy = with_a_large_head(factor)
        for recipe in (LAYER, HEAD):
            name = factor, recipe.kv_granularity
            engine = engine_of(recipe, policy)
            found[name] = values_of_the_small_head(policy, recipe, engine.scales)
            rollout = engine.generate(make_prompts(), 2, PLAIN, KEY)
            full = full_logits(engine_of(RECIPES["bf16"], policy), rollout)
            expected = take(log_softmax(full / 0.8), rollout.tokens)
            error[name] = np.abs(expected - rollout.policy_logprobs).mean()
    for factor in (100.0, 2.0**20):
        np.testing.assert_allclose(found[factor, "head"], found[1.0, "head"], rtol=1e-3)
        assert error[factor, "head"] < 1.5 * error[1.0, "head"]
    assert found[100.0, "layer"][0] > found[100.0, "head"][0]
    assert found[100.0, "layer"][1] > found[100.0, "head"][1]
    assert found[2.0**20, "layer"] == (1.0, 1.0)
    assert error[2.0**20, "layer"] > 3 * error[2.0**20, "head"]


def test_the_rollout_calibrates_a_scale_for_each_head_and_measures_the_ones_before():
    engine = LocalEngine(replace(HEAD, kv_calibration="rollout"), jnp.float32)
    policy, prompts = make_policy(), make_prompts(seed=5)
    engine.sync(policy)
    engine.calibrate(prompts)
    assert engine.scales is not None and engine.scales.key.shape == (CONFIG.num_layers, HEADS)
    # nothing is quantized before the first layer's attention
    np.testing.assert_allclose(
        stacked(engine.scales)[0], amax_of_heads(policy, prompts)[0] * 1.05 / 448, rtol=1e-5
    )
    assert engine.finite["kv_scale"] and "fp8/amax_k" not in engine.metrics
    engine.sync(policy)
    engine.calibrate(prompts)
    assert 20 < engine.metrics["fp8/quant_snr_db_k"] < 40
    assert engine.metrics["fp8/sat_frac_v"] == 0


def test_a_nan_in_one_head_is_seen():
    engine = engine_of(HEAD)
    broken = replace(engine.scales, value=engine.scales.value.at[1, 1].set(jnp.nan))
    engine.sync(make_policy(), SyncContext(scales=broken))
    assert not engine.finite["kv_scale"] and engine.finite["weight"]

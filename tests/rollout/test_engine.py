"""Weight sync, KV calibration and finite flags."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import make_engine, make_policy, make_prompts

from fp8rl_jax.config.recipe import RECIPES, PrecisionConfig, get_recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import with_scales
from fp8rl_jax.rollout import engine as engine_module
from fp8rl_jax.rollout.calibration import calibrate_on_prompts, observe_qkv, scales_from_amax
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine, balanced, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext

FULL = RECIPES["fp8-rl"]


def test_scales_are_percentile_times_margin_over_448():
    amax = np.random.default_rng(0).uniform(1, 9, (11, 2, 3)).astype(np.float32)
    ordered = np.sort(amax, axis=0)
    for percentile, pick in ((99.9, 10), (50, 5), (0, 0)):
        recipe = FULL.__class__("x", FULL.rollout, kv_percentile=percentile, kv_margin=1.2)
        scales = scales_from_amax(jnp.asarray(amax), recipe)
        np.testing.assert_allclose(table(scales), ordered[pick] * 1.2 / 448, rtol=1e-6)


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


@pytest.mark.parametrize("interrupted", ["_convert", "_seen"])
def test_an_interrupted_sync_leaves_nothing_to_serve(monkeypatch, fault, interrupted):
    """Whether before the weights are made or behind it: never new weights with older scales."""
    engine, prompts = make_engine("fp8-rl"), make_prompts()
    before = engine.generate(prompts, 1, Sampling(4), jax.random.key(0))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner = engine if interrupted == "_convert" else engine_module
        patch.setattr(owner, interrupted, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.sync(make_policy(seed=1), SyncContext(scales=engine.scales))
    asked = time.monotonic()
    with pytest.raises(RuntimeError, match="call sync first") as raised:
        engine.generate(prompts, 1, Sampling(4), jax.random.key(0))
    fault("cut sync", str(raised.value), detected=time.monotonic() - asked)
    scales = calibrate_on_prompts(make_policy(), make_prompts(seed=5), engine.recipe, jnp.float32)
    engine.sync(make_policy(), SyncContext(scales=scales))
    again = engine.generate(prompts, 1, Sampling(4), jax.random.key(0))
    np.testing.assert_array_equal(again.tokens, before.tokens)


def flipped(x, bit: int):
    """`x` with one bit of its last element changed."""
    words = np.array(x)[None]
    words.view(f"uint{8 * words.dtype.itemsize}").reshape(-1)[-1] ^= 1 << bit
    return jnp.asarray(words[0])


@pytest.mark.parametrize("paged", [False, True])
def test_one_bit_of_what_is_served_is_found_before_anything_is_sampled(monkeypatch, fault, paged):
    engine, prompts, request = make_engine("fp8-rl"), make_prompts(), (1, Sampling(2))
    if paged:
        served = engine
        engine = PagedEngine(FULL, jnp.float32)
        engine.sync(make_policy(), SyncContext(scales=served.scales))
    key = jax.random.key(0)
    before = engine.generate(prompts, *request, key)
    for changed in ("generate", "paged_generate"):
        monkeypatch.setattr(engine_module, changed, lambda *_, **__: pytest.fail("sampled"))
    policy, scales = engine.policy, engine.scales
    leaves, tree = jax.tree.flatten(policy)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(policy)
    ]
    of_cache = next(i for i, name in enumerate(names) if name.startswith("scales."))
    assert {str(x.dtype) for x in leaves} == {"float8_e4m3fn", "float32"}
    for place, bit in ((0, 0), (3, 31), (5, 7), (of_cache, 3)):
        broken = [
            flipped(x, bit % (8 * x.dtype.itemsize)) if i == place else x
            for i, x in enumerate(leaves)
        ]
        engine.policy = jax.tree.unflatten(tree, broken)
        asked, told = time.monotonic(), f"{re.escape(names[place])} is no longer what sync 1 wrote"
        with pytest.raises(UserError, match=told) as raised:
            engine.generate(prompts, *request, key)
        fault("served bit", str(raised.value), status=2, detected=time.monotonic() - asked)
        with pytest.raises(RuntimeError, match="call sync first"):
            engine.generate(prompts, *request, key)
    monkeypatch.undo()
    engine.sync(make_policy(), SyncContext(scales=scales))
    again = engine.generate(prompts, *request, key)
    np.testing.assert_array_equal(again.tokens, before.tokens)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_prompts_are_dealt_in_equal_numbers_and_about_equal_lengths(parts):
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(balanced(np.zeros(12), parts), np.arange(12))
    saved = []
    for _ in range(20):
        expected = rng.lognormal(3, 1, 12)
        order = balanced(expected, parts)
        assert sorted(order) == list(range(12))
        dealt = expected[order].reshape(parts, -1)
        assert (np.diff(dealt, axis=1) <= 0).all()  # the longest of a part are served first
        in_turn = expected.reshape(parts, -1).sum(1)
        saved.append(1 - dealt.sum(1).max() / in_turn.max())
    assert np.mean(saved) > 0.1 * (parts > 1) - 1e-9 and min(saved) > -0.05


def calibrated_engine(unroll: bool = True, **changes) -> LocalEngine:
    """Of fp8-rl, calibrated by the rollout on the prompts of seed 5."""
    engine = LocalEngine(
        get_recipe("fp8-rl", PrecisionConfig(kv_calibration="rollout", **changes)),
        jnp.float32,
        unroll,
    )
    engine.sync(make_policy())
    engine.calibrate(make_prompts(seed=5))
    return engine


def table(scales) -> np.ndarray:
    """[layers, 3]"""
    return np.stack([scales.query, scales.key, scales.value], -1)


def layer_by_layer(engine: LocalEngine, prompts, limits) -> np.ndarray:
    """Scales found one layer at a time, each in a prefill of its own that serves the scales found
    for the layers before it."""
    layers = engine.policy.config.num_layers
    scales = np.ones((layers, 3), np.float32)
    real = np.arange(prompts.tokens.shape[1]) < prompts.lengths[:, None]

    def amax(q, k, v, real, scales):
        return jnp.stack([jnp.where(real, jnp.abs(x), 0).max() for x in (q, k, v)]), scales

    for layer in range(layers):
        seen = forward(
            with_scales(engine.policy, KVScales(*map(jnp.asarray, scales.T))),
            jnp.asarray(prompts.tokens),
            segment_ids=jnp.asarray(real, jnp.int32),
            observe=amax,
        )
        scales[layer] = np.asarray(seen.observed)[layer] / limits
    return scales


def check_scales(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal in the first layer. Behind quantized attention a last bit may flip an e4m3 rounding,
    which moves an amax by some per cent on one processor and not on another."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1:], expected[1:], rtol=0.05)


@pytest.mark.parametrize("unroll", [True, False])
def test_rollout_calibration_is_that_of_the_forward_that_serves(unroll):
    """Quantized activations, and each layer behind the quantized attention of those before it: not
    the trainer's forward."""
    engine, prompts = calibrated_engine(unroll), make_prompts(seed=5)
    expected = layer_by_layer(engine, prompts, 448 / 1.05)
    check_scales(table(engine.scales), expected)
    trainers = table(calibrate_on_prompts(make_policy(), prompts, FULL, jnp.float32))
    assert (np.abs(trainers / expected - 1) > 1e-3).sum() >= 4  # of six
    assert (
        engine.finite["kv_scale"]
        and engine.generate(prompts, 1, Sampling(2), jax.random.key(0)).weight_version == 1
    )


def test_verls_constants():
    engine = calibrated_engine(kv_rule="verl")
    check_scales(
        table(engine.scales), layer_by_layer(engine, make_prompts(seed=5), [200, 200, 100])
    )


def test_batches_are_measured_apart_and_joined_by_their_largest():
    engine, other = calibrated_engine(), make_prompts(seed=6)
    alone = table(engine.scales)
    engine.calibrate(other)
    second = table(engine.scales)
    engine.calibrate(make_prompts(seed=5), other)
    np.testing.assert_allclose(table(engine.scales), np.maximum(alone, second), rtol=1e-6)
    assert (alone > second).any() and (alone < second).any()


def test_only_an_explicit_call_calibrates_the_rollouts_cache():
    engine = calibrated_engine()
    before = table(engine.scales)
    engine.generate(make_prompts(seed=1), 1, Sampling(2), jax.random.key(0))
    np.testing.assert_array_equal(table(engine.scales), before)
    assert "fp8/amax_k" not in engine.metrics
    engine.sync(make_policy(seed=1))
    for ask in (engine.generate, engine.stream):
        options = (1, Sampling(2)) if ask == engine.generate else (Sampling(2),)
        with pytest.raises(
            RuntimeError,
            match=r"no KV scales for these weights; call calibrate\(prompts\) after sync",
        ):
            ask(make_prompts(), *options, jax.random.key(0))
    engine.calibrate(make_prompts(seed=5))
    np.testing.assert_allclose(
        engine.metrics["fp8/amax_k"], table(engine.scales)[:, 1].max() * 448 / 1.05, rtol=1e-6
    )
    assert 20 < engine.metrics["fp8/quant_snr_db_k"] < 40  # under the scales of the weights before
    with pytest.raises(
        RuntimeError, match="recipe 'bf16' does not calibrate a cache in the rollout"
    ):
        make_engine("bf16").calibrate(make_prompts())


def test_calibration_sees_prompts_and_completions_and_no_padding():
    """As many tokens as one row of prompt and completion has, and their largest magnitudes."""
    rng, (tokens, lengths, _) = np.random.default_rng(2), make_prompts((9, 4, 1, 6), (1, 2, 3, 4))
    completions = rng.integers(1, 131, (8, 5)).astype(np.int32)
    mask = np.arange(5) < np.array([5, 1, 3, 5, 2, 4, 1, 2])[:, None]
    rows, ends = (
        np.full((8, 14), 130, np.int32),
        np.repeat(lengths, 2) + mask.sum(1).astype(np.int32),
    )
    for row, prompt in enumerate(np.repeat(np.arange(4), 2)):
        real = [*tokens[prompt, : lengths[prompt]], *completions[row, mask[row]]]
        rows[row, : len(real)] = real
    options = {"recipe": RECIPES["bf16"], "dtype": jnp.float32}
    whole = observe_qkv(make_policy(), rows, ends, **options, micro_batches=2)
    found = observe_qkv(
        make_policy(), tokens, lengths, completions, mask, **options, micro_batches=2
    )
    assert found.amax.shape == (2, 2, 3)
    np.testing.assert_allclose(found.amax, whole.amax, rtol=1e-5)
    # the prompt once for both its samples, four query heads and two of keys and of values
    counted = (lengths + mask.reshape(4, 2, 5).sum((1, 2))).reshape(2, 2).sum(1)
    np.testing.assert_array_equal(found.elements[:, 0], counted[:, None] * 32 * np.array([4, 2, 2]))


def test_calibration_on_some_of_the_prompts_measures_every_so_many_th():
    rng, (tokens, lengths, _) = np.random.default_rng(2), make_prompts((9, 4, 1, 6), (1, 2, 3, 4))
    completions = rng.integers(1, 131, (8, 5)).astype(np.int32)
    mask = np.arange(5) < np.array([5, 1, 3, 5, 2, 4, 1, 2])[:, None]

    def seen(wanted: int, every: int = 1):
        few = completions.reshape(4, 2, 5)[::every].reshape(-1, 5)
        real = mask.reshape(4, 2, 5)[::every].reshape(-1, 5)
        recipe = replace(RECIPES["bf16"], kv_prompts=wanted)
        batch = tokens[::every], lengths[::every], few, real
        found = observe_qkv(
            make_policy(), *batch, recipe=recipe, dtype=jnp.float32, micro_batches=4 // every
        )
        return found.amax.max(0), found.elements.sum(0)

    for wanted, every in ((0, 1), (1, 4), (2, 2), (3, 1), (9, 1)):
        for found, expected in zip(seen(wanted), seen(0, every), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


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

"""Weight sync of a policy with adapters: the base is converted once, and what is served is what the
trainer holds."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, full_logits, log_softmax, make_policy, make_prompts, take

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.forms import quantized_base
from fp8rl_jax.models.lora import build_adapters, build_norms, join, merge, split
from fp8rl_jax.precision import QuantizedWeight
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampling import Sampling

LORA = LoraConfig(rank=4, alpha=8.0, norms=("post_attention_layernorm", "norm"))


def adapters(seed: int):
    """And norms that are trained beside them."""
    rng = np.random.default_rng(seed)

    def drawn(shape):
        return jnp.asarray(rng.normal(size=shape) * (shape[-1] / 2) ** -0.5, jnp.float32)

    return build_adapters(
        CONFIG, LORA, lambda name, *shapes: [drawn(s) for s in shapes]
    ) | build_norms(CONFIG, LORA, lambda name, shape: 1 + drawn(shape))


def frozen(recipe, base: str):
    convert = partial(quantized_base, recipe=recipe, dtype=jnp.float32)
    return jax.jit(convert)(make_policy()) if base == "rollout" else make_policy()


def generate(engine):
    return engine.generate(make_prompts(), 2, Sampling(4, 1.0), jax.random.key(0))


@pytest.mark.parametrize("unroll", [True, False], ids=["unroll", "scan"])
@pytest.mark.parametrize(
    ("name", "base"), [("bf16", "compute"), ("fp8-rollout", "compute"), ("fp8-rollout", "rollout")]
)
def test_the_base_is_converted_once_and_the_adapters_at_every_sync(name, base, unroll):
    engine, base = LocalEngine(RECIPES[name], jnp.float32, unroll), frozen(RECIPES[name], base)
    served = []
    for seed in (0, 1):
        assert engine.sync(join(adapters(seed), base)) == seed + 1 and bool(engine.finite["weight"])
        served.append(jax.tree.leaves(engine.policy))
        layer = engine.policy.layers[0] if unroll else engine.policy.layers
        assert isinstance(layer.up_proj.value.base, QuantizedWeight) == (name == "fp8-rollout")
        assert layer.up_proj.value.a.dtype == jnp.float32
    same = [one is other for one, other in zip(*served, strict=True)]
    in_layers = len(jax.tree.leaves(adapters(0))) - 1  # all but the last norm
    count = in_layers * (CONFIG.num_layers if unroll else 1) + 1
    assert same.count(False) == count
    fresh = LocalEngine(RECIPES[name], jnp.float32, unroll)
    fresh.sync(join(adapters(1), base))
    rollout = generate(engine)
    np.testing.assert_array_equal(rollout.tokens, generate(fresh).tokens)
    mask = np.asarray(rollout.mask)
    expected = take(log_softmax(full_logits(engine, rollout)), rollout.tokens)
    np.testing.assert_allclose(
        np.asarray(rollout.policy_logprobs)[mask],
        expected[mask],
        atol=1e-4 if name == "bf16" else 0.3,
    )
    engine.sync(join(adapters(1), make_policy(seed=1)))  # another base is served as it is
    assert not np.array_equal(engine.policy.embed_tokens.value, base.embed_tokens.value)


def test_a_base_in_the_rollout_s_form_is_served_without_a_copy():
    for name in ("bf16", "fp8-rollout"):
        base = frozen(RECIPES[name], "rollout")
        engine = LocalEngine(RECIPES[name], jnp.float32, unroll=False)
        engine.sync(join(adapters(0), base))
        mine = split(join(adapters(0), base))[1]  # without the norms that are trained
        shared = zip(jax.tree.leaves(split(engine.policy)[1]), jax.tree.leaves(mine), strict=True)
        assert all(one is other for one, other in shared) and engine.metrics == {}


def test_quantization_is_measured_and_its_metrics_stay():
    engine = LocalEngine(RECIPES["fp8-rollout"], jnp.float32)
    base = make_policy()
    for seed in (0, 1):
        engine.sync(join(adapters(seed), base))
        assert 25 < engine.metrics["fp8/quant_snr_db_weight"] < 35


def test_samples_are_those_of_the_merged_policy():
    adapted = join(adapters(0), make_policy())
    engine, merged = (LocalEngine(RECIPES["bf16"], jnp.float32) for _ in range(2))
    engine.sync(adapted)
    merged.sync(jax.tree.map(jnp.asarray, merge(adapted)))
    one, other = generate(engine), generate(merged)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.policy_logprobs, other.policy_logprobs, atol=1e-4)

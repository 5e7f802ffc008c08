"""Adapted policies and norms that are trained beside adapters: what they compute, what is trained of
them, what they merge to, and which settings are refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_llama as reference
from test_forward import TOLERANCE, logits, policy_and_weights, random_tokens, run
from tiny_models import LLAMA, MOE, QWEN3

from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forms import quantized_base
from fp8rl_jax.models.lora import (
    adapted_tensors,
    build_adapters,
    build_norms,
    init_adapters,
    join,
    merge,
    norms_of,
    split,
    trained_norms,
    unstack_adapters,
)
from fp8rl_jax.models.policy import cast, unstack

LORA = LoraConfig(rank=3, alpha=6.0)
ATTENTION = LoraConfig(rank=3, alpha=6.0, targets=("*.q_proj", "*.o_proj"))
WITH_NORMS = LoraConfig(rank=3, alpha=6.0, targets=("*.q_proj", "*.o_proj"), norms=("*norm",))
CASES = {
    "qwen3_norms": (QWEN3, WITH_NORMS),
    "llama": (LLAMA, LORA),
    "qwen3_attention": (QWEN3, ATTENTION),
    "moe": (MOE, LORA),
    "moe_attention": (MOE, ATTENTION),
}


def random_adapters(config, lora):
    rng = np.random.default_rng(3)

    def drawn(shape):
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

    return build_adapters(
        config, lora, lambda name, *shapes: [drawn(shape) for shape in shapes]
    ) | build_norms(config, lora, lambda name, shape: 1 + drawn(shape))


def added_up(weights, adapters):
    """The float64 weights of the reference with every adapter added, W + scale B A, and with the
    norms that are trained."""
    weights = dict(weights)
    for name, adapter in adapters.items():
        if name.endswith("norm"):
            path = "norm.weight" if name == "norm" else f"layers.{name}.weight"
            weights[path] = np.asarray(adapter.value, np.float64)
            continue
        b, a = np.asarray(adapter.b.value, np.float64), np.asarray(adapter.a.value, np.float64)
        # alpha / rank = 2
        weights[f"layers.{name}.weight"] = weights[f"layers.{name}.weight"] + 2.0 * b @ a
    return weights


@pytest.mark.parametrize(("config", "lora"), CASES.values(), ids=CASES)
def test_logits_equal_the_float64_reference_of_the_added_up_weights(config, lora):
    policy, weights = policy_and_weights(config)
    adapters = random_adapters(config, lora)
    expected_weights, tokens = added_up(weights, adapters), random_tokens(config, 2, 24)
    expected = [reference.logits(config, expected_weights, row.tolist()) for row in tokens]
    adapted = join(adapters, policy)
    unrolled = join(unstack_adapters(adapters, config), unstack(policy))
    for form in (adapted, unstack(adapted), unrolled):
        np.testing.assert_allclose(logits(policy, run(form, tokens).hidden), expected, **TOLERANCE)
    plain = [reference.logits(config, weights, row.tolist()) for row in tokens]
    assert np.abs(np.asarray(plain) - expected).max() > 0.1
    merged = merge(adapted)
    assert split(merged)[1] is None and merged.layers.q_proj.value.dtype == np.float32
    np.testing.assert_allclose(logits(policy, run(merged, tokens).hidden), expected, **TOLERANCE)
    assert jax.tree.structure(merged) == jax.tree.structure(policy)
    for name, weight in merged.layers.tensors().items():
        np.testing.assert_allclose(
            weight.value, expected_weights[f"layers.{name}.weight"], rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize(
    "config", [LLAMA, pytest.param(MOE, marks=pytest.mark.slow)], ids=["llama", "moe"]
)
def test_a_new_adapter_changes_no_bit(config):
    policy = cast(policy_and_weights(config)[0], jnp.bfloat16)
    adapters = init_adapters(config, LORA, jax.random.key(1))
    tokens = random_tokens(config, 2, 9)
    for base in (policy, unstack(policy)):
        own = adapters if base.stacked else unstack_adapters(adapters, config)
        adapted = jax.jit(cast, static_argnums=1)(join(own, base), jnp.bfloat16)
        got, expected = run(adapted, tokens).hidden, run(base, tokens).hidden
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_first_values_are_peft_s():
    """kaiming_uniform_(a=sqrt(5)) of [rank, in] is uniform in +-1/sqrt(in); b is zero; rsLoRA
    divides alpha by sqrt(rank)."""
    adapters = init_adapters(MOE, LoraConfig(rank=16, alpha=8.0, rslora=True), jax.random.key(0))
    assert list(adapters) == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "experts.gate_proj",
        "experts.up_proj",
        "experts.down_proj",
    ]
    for name, adapter in adapters.items():
        a, bound = np.asarray(adapter.a.value), adapter.a.value.shape[-1] ** -0.5
        assert (
            a.dtype == np.float32
            and 0.9 * bound < np.abs(a).max() <= bound
            and abs(a.std() - bound / 3**0.5) < 0.1 * bound
        )
        assert not np.asarray(adapter.b.value).any() and adapter.scale == 2.0, name
    assert adapters["experts.down_proj"].a.value.shape == (3, 5, 16, 24)
    assert adapters["experts.down_proj"].b.value.shape == (3, 5, 48, 16)
    assert adapters["o_proj"].a.axes == ("layers", "rank", "heads") and adapters[
        "o_proj"
    ].b.axes == ("layers", "embed", "rank")
    assert not np.array_equal(adapters["gate_proj"].a.value, adapters["up_proj"].a.value)
    assert LORA.scale == 2.0


def test_split_and_join_copy_nothing():
    policy = policy_and_weights(QWEN3)[0]
    assert (
        split(policy)[0] is policy
        and split(policy)[1] is None
        and join(policy, None) is policy
        and merge(policy) is policy
    )
    adapters = init_adapters(QWEN3, ATTENTION, jax.random.key(1))
    trained, frozen = split(join(adapters, policy))
    assert list(trained) == ["q_proj", "o_proj"] and jax.tree.structure(
        frozen
    ) == jax.tree.structure(policy)
    for one, other in zip(
        jax.tree.leaves((trained, frozen)), jax.tree.leaves((adapters, policy)), strict=True
    ):
        assert one is other


def test_a_norm_that_is_trained_is_no_part_of_the_base():
    policy = policy_and_weights(QWEN3)[0]
    norms = norms_of(policy, WITH_NORMS)
    names = (
        "input_layernorm",
        "post_attention_layernorm",
        "q_norm",
        "k_norm",
        "norm",
    )
    assert (*norms,) == names == trained_norms(QWEN3, WITH_NORMS)
    given = init_adapters(QWEN3, ATTENTION, jax.random.key(1)) | norms
    trained, frozen = split(join(given, policy))
    assert trained.keys() == given.keys() and frozen.norm is None
    assert set(policy.layers.tensors()) - set(frozen.layers.tensors()) == {*names} - {"norm"}
    again = split(join(trained, frozen))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves((trained, frozen)), strict=True):
        assert one is other
    assert trained["norm"].value is policy.norm.value
    count = sum(x.size for x in jax.tree.leaves(policy))
    whole = sum(x.size for x in jax.tree.leaves((norms, frozen)))
    assert whole == count
    # QeRL's two (NVlabs/QeRL at e8c6e79, qerl.py: modules_to_save)
    two = LoraConfig(rank=2, norms=("input_layernorm", "post_attention_layernorm"))
    assert trained_norms(LLAMA, two) == two.norms
    with pytest.raises(
        UserError, match=r"lora\.norms: 'q_norm' matches no norm .* has input_layer"
    ):
        trained_norms(LLAMA, LoraConfig(rank=2, norms=("norm", "q_norm")))


def test_an_fp8_base_merges_as_what_it_stands_for():
    """The adapters were trained beside the quantized weights, so these, dequantized, are what they
    are added to."""
    policy, adapters = policy_and_weights(QWEN3)[0], random_adapters(QWEN3, ATTENTION)
    freeze = partial(quantized_base, recipe=get_recipe("fp8-rollout"), dtype=jnp.float32)
    frozen = jax.jit(freeze)(policy)
    adapted = join(adapters, frozen)
    merged, tokens = merge(adapted), random_tokens(QWEN3, 2, 9)
    assert all(
        isinstance(weight.value, np.ndarray | jax.Array)
        for weight in merged.layers.tensors().values()
    )
    # the trainer's side quantizes no activation, so both are the same function
    np.testing.assert_allclose(
        logits(policy, run(merged, tokens).hidden),
        logits(policy, run(adapted, tokens).hidden),
        atol=1e-4,
    )
    # quantized, not adapted
    assert not np.allclose(merged.layers.up_proj.value, policy.layers.up_proj.value, rtol=1e-4)


def test_a_linear_is_chosen_in_all_its_layers():
    assert adapted_tensors(
        MOE, LoraConfig(rank=2, targets=("layers.[0-3].up_proj", "*.experts.*"))
    ) == (
        "up_proj",
        "experts.gate_proj",
        "experts.up_proj",
        "experts.down_proj",
    )


@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        (
            LLAMA,
            LoraConfig(rank=2, targets=("*.q_proj", "*.qkv_proj")),
            r"lora.targets: '\*.qkv_proj' matches no linear.*q_proj",
        ),
        (LLAMA, LoraConfig(rank=2, targets=("q_proj",)), "'q_proj' matches no linear"),
        (
            LLAMA,
            LoraConfig(rank=2, targets=("lm_head",)),
            "'lm_head' names lm_head, and only the linears",
        ),
        (LLAMA, LoraConfig(rank=2, targets=("*_proj", "embed*")), "names embed_tokens"),
        (MOE, LoraConfig(rank=2, targets=("*.router",)), r"names layers.0.router"),
        (
            LLAMA,
            LoraConfig(rank=2, targets=("layers.1.q_proj",)),
            "q_proj is chosen in 1 layers and not in layer 0",
        ),
        (
            LLAMA,
            LoraConfig(rank=33, targets=("*.q_proj", "*.k_proj")),
            r"lora.rank = 33 is above a side of k_proj \[32, 64\]",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(config, lora, message):
    with pytest.raises(UserError, match=message):
        adapted_tensors(config, lora)


def test_settings_are_checked():
    assert LoraConfig().problems() == [] and LORA.problems() == []
    wrong = (LoraConfig(rank=-1, alpha=0.0), LoraConfig(rank=1, targets=()), LoraConfig(path="x"))
    faults = [fault for config in wrong for fault in config.problems()]
    keys = (
        "lora.rank = -1",
        "lora.alpha = 0.0",
        "lora.targets is empty",
        "lora.path is set but lora.rank is 0",
    )
    assert len(faults) == 4 and all(key in fault for key, fault in zip(keys, faults, strict=True))

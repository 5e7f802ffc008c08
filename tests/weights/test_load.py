from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    MOE,
    QWEN2,
    QWEN3,
    policy_arrays,
    random_tensors,
    tokenizer_of,
    write_model,
)

from fp8rl_jax.config.run import InitConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import init_policy, unstack
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
from fp8rl_jax.weights.hf_directory import converted_tensors
from fp8rl_jax.weights.hf_names import hf_tensors
from fp8rl_jax.weights.load import (
    byte_policy_config,
    device_tensors,
    load_policy,
    save_policy,
)


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN3, QWEN2, MOE], ids=["llama_tied", "qwen3_untied", "qwen2", "moe"]
)
def test_every_tensor_arrives_in_its_place_and_dtype(tmp_path, config):
    tensors = random_tensors(config)
    policy = load_policy(write_model(tmp_path, config, tensors))
    assert (
        policy.config == config
        and policy.stacked
        and (policy.lm_head is None) == config.tie_word_embeddings
    )
    flat = policy_arrays(policy)
    for name, place in hf_tensors(config).items():
        got = flat[place.path][place.index]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, tensors[name].astype(np.float32), err_msg=name)
    half = load_policy(tmp_path, jnp.bfloat16)
    assert half.layers.tensors()["q_proj"].value.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_and_loading_gives_the_same_policy(tmp_path, dtype):
    policy = init_policy(QWEN3, jax.random.key(0))
    again = load_policy(save_policy(policy, tmp_path / "out", dtype=dtype))
    assert again.config == QWEN3 and load_tokenizer(tmp_path / "out") is None
    saved = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    for old, new in zip(jax.tree.leaves(policy), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(old).astype(saved).astype(np.float32), new)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8-block"])
@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama_tied", "moe"])
def test_tensors_of_the_device_are_those_of_an_export(tmp_path, config, dtype):
    """Bit for bit, in its order."""
    policy = init_policy(config, jax.random.key(0))
    groups = converted_tensors(tmp_path, config, policy_arrays(policy), dtype)
    expected = {name: x for group in groups for name, x in group.items()}
    found = dict(device_tensors(policy, dtype))
    assert list(found) == list(expected)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        assert np.asarray(found[name]).tobytes() == np.ascontiguousarray(x).tobytes(), name


def test_tensors_of_the_device_that_are_not_finite_are_named():
    policy = init_policy(LLAMA, jax.random.key(0))
    large = jax.tree.map(lambda x: 1e38 * jnp.sign(x) if x.ndim == 3 else x, policy)
    assert len(dict(device_tensors(large, "float32"))) == len(hf_tensors(LLAMA))
    with pytest.raises(UserError, match="not finite in float16: model.layers.0.mlp.down_proj"):
        dict(device_tensors(large, "float16"))


def test_tokenizers_travel_with_the_policy(tmp_path):
    policy = init_policy(LLAMA, jax.random.key(0))
    save_policy(policy, tmp_path / "first", ByteTokenizer())
    save_policy(policy, tmp_path / "second", tmp_path / "first")
    tokenizer = tokenizer_of(tmp_path / "second", LLAMA.vocab_size)
    assert tokenizer.encode("né") == ByteTokenizer().encode("né")


def test_a_rollout_policy_is_not_exported(tmp_path):
    policy = init_policy(QWEN3, jax.random.key(0))
    with pytest.raises(ValueError, match="unrolled"):
        save_policy(unstack(policy), tmp_path)


def test_a_value_beyond_the_dtype_is_refused_by_name(tmp_path):
    config = dataclasses.replace(QWEN3, num_layers=1)
    tensors = random_tensors(config, np.float32)
    tensors["model.norm.weight"][3] = 1e6
    with pytest.raises(UserError, match="norm.weight overflow float16"):
        load_policy(write_model(tmp_path, config, tensors), jnp.float16)


def test_the_built_in_policy_holds_the_byte_tokenizer_and_divides_over_a_mesh():
    config = byte_policy_config(InitConfig(hidden_size=128))
    assert config.hidden_size == 128 and config.eos_token_ids == (258,)
    assert config.vocab_size >= ByteTokenizer.vocab_size and config.vocab_size % 8 == 0


def test_the_built_in_policy_may_have_experts():
    config = byte_policy_config(
        InitConfig(intermediate_size=32, num_layers=2, num_experts=4, experts_per_token=3)
    )
    assert config.architecture == "qwen3_moe" and config.sparse_layers == (0, 1)
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.intermediate_size) == (
        4,
        3,
        32,
    )
    for wrong in (
        {"num_experts": -1},
        {"num_experts": 2, "experts_per_token": 3},
        {"num_experts": 2, "experts_per_token": 0},
    ):
        with pytest.raises(UserError, match="num_experts"):
            byte_policy_config(InitConfig(**wrong))

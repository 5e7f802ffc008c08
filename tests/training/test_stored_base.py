"""A frozen base of adapters whose checkpoint is in the rollout's own format rests in the file's
codes: nothing is rounded a second time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8rl_jax as fp8rl
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import LinearPrecision
from fp8rl_jax.config.run import ModelConfig, RunConfig
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.lora import split
from fp8rl_jax.precision import QTensor, linear, quantize
from fp8rl_jax.precision.linear import QuantizedWeight
from fp8rl_jax.training.plan import memory_plan
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.source import load_model
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.load import byte_policy, save_policy
from fp8rl_jax.weights.safetensors_io import read_safetensors, write_safetensors

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32
)
MODEL = cache(partial(byte_policy, **SIZES))
EXPERTS = cache(partial(byte_policy, **SIZES, num_experts=2, experts_per_token=1))
UP = "model.layers.1.mlp.experts.1.up_proj.weight"


def checkpoint(directory, form, model=MODEL):
    """A model whose codes were drawn, so that no quantizer would make them anew."""
    policy, tokenizer = model()
    save_policy(policy, directory, tokenizer, form)
    file, rng = directory / "model.safetensors", np.random.default_rng(0)
    tensors = read_safetensors(file)
    for name, x in tensors.items():
        if name.endswith(("_packed", "proj.weight")) and x.dtype != "bfloat16":
            codes = rng.permutation(np.array(x).reshape(-1)).reshape(x.shape)
            tensors[name] = codes ^ 0x11 if x.dtype == np.uint8 else codes
    write_safetensors(file, tensors)
    return tensors


def config_of(directory, weight, **changes):
    row = {"rollout": {"weight": weight}, "trainer": {"weight": weight}} | changes
    return replace(
        RunConfig(),
        recipe="mine",
        recipes={"mine": row},
        model=ModelConfig(path=str(directory)),
        lora=LoraConfig(rank=4, base="rollout"),
        compute_dtype="float32",
    )


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4@modelopt", "nvfp4_four_over_six"),
        ("mxfp8", "mxfp8"),
        ("mxfp6", "mxfp6"),
        ("mxfp4", "mxfp4_up"),
        ("int4", "int4"),
        ("fp8-block", "e4m3-128x128"),
    ],
)
def test_a_base_is_the_files_own_codes(form, weight, tmp_path, caplog):
    tensors = checkpoint(tmp_path, form, EXPERTS)
    policy, _ = load_model(config_of(tmp_path, weight))
    assert "quantized anew" not in caplog.text
    _, arrays = load_policy_arrays(tmp_path)
    for name, held in policy.stack.tensors().items():
        expected = arrays[f"layers.{name}.weight"]
        if not name.endswith("_proj"):
            assert held.value.dtype == jnp.float32
            continue
        assert isinstance(held.value, QTensor) and held.value.shape == expected.shape
        np.testing.assert_array_equal(held.value.dequantize(), expected)
    found = policy.stack.tensors()["experts.up_proj"].value
    if form == "int4":
        anew = jax.jit(lambda x: quantize(x, parse_format(weight)).dequantize())
        assert not np.array_equal(anew(found.dequantize()), found.dequantize())
    packed = {"mxfp8": UP, "fp8-block": UP, "nvfp4@modelopt": UP}.get(form, f"{UP}_packed")
    if form not in ("mxfp6", "int4"):  # which the library stores otherwise
        np.testing.assert_array_equal(bits(found.values[1, 1]), bits(tensors[packed]))
    scale = f"{UP}_scale_inv" if form == "fp8-block" else f"{UP}_scale"
    np.testing.assert_array_equal(bits(found.scales[1, 1]), bits(tensors[scale]))
    if form == "nvfp4":
        np.testing.assert_array_equal(found.outer[1, 1, 0], 1 / tensors[f"{UP}_global_scale"])


def bits(x):
    x = np.asarray(x)
    return x.reshape(-1).view(np.uint8)


def test_a_session_holds_and_multiplies_the_codes(tmp_path):
    """On both sides; and the plan counts the bytes that there are."""
    checkpoint(tmp_path, "nvfp4")
    config = config_of(tmp_path, "nvfp4")
    policy, tokenizer = load_model(config)
    session = Session(policy, tokenizer, config=config)
    _, base = split(session.weights)
    _, arrays = load_policy_arrays(tmp_path)
    x = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    for name in ("q_proj", "up_proj"):
        held = base.stack.tensors()[name].value
        np.testing.assert_array_equal(held.dequantize(), arrays[f"layers.{name}.weight"])
        one = jax.tree.map(lambda x: x[1], held)
        weight = QuantizedWeight(one, precision=LinearPrecision(parse_format("nvfp4")))
        y = linear(jnp.asarray(x), weight, jnp.dtype("float32"))
        expected = x.astype(np.float64) @ arrays[f"layers.{name}.weight"][1].astype(np.float64).T
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(base))
    planned = memory_plan(policy.config, config).always["frozen base"]
    assert planned == live
    half = sum(x.size for name, x in arrays.items() if name.endswith("_proj.weight")) / 2
    rest = 4 * sum(x.size for name, x in arrays.items() if not name.endswith("_proj.weight"))
    assert live - rest == half * 9 / 8 + 14 * 4  # a scale for 16 codes, and one for all
    assert np.isfinite(session.logprobs([[1, 2, 3]], [[4, 5]])[0]).all()


@pytest.mark.parametrize(("form", "recipe"), [("nvfp4", "nvfp4-rl"), ("fp8-block", "jet-rl")])
def test_from_python_a_base_is_the_files_own_codes(form, recipe, tmp_path, caplog):
    """Those of the base, of what is served, and the bytes that are planned; the policy that was
    loaded stays as it is, and one that has changed since is quantized anew."""
    tensors = checkpoint(tmp_path, form)
    policy, tokenizer = fp8rl.load(tmp_path)
    settings = dict(rank=2, base="rollout", compute_dtype="float32", decode_layers="scan")
    session = fp8rl.Session(policy, tokenizer, recipe, **settings)
    session.sync()
    _, base = split(session.weights)
    served = session.engine.policy.stack.tensors()
    for name in ("q_proj", "down_proj"):
        file = f"model.layers.1.{'self_attn' if name[0] == 'q' else 'mlp'}.{name}.weight"
        packed, scale = ("_packed", "_scale") if form == "nvfp4" else ("", "_scale_inv")
        for held in (base.stack.tensors()[name].value, served[name].base.value.quantized):
            np.testing.assert_array_equal(bits(held.values[1]), bits(tensors[file + packed]))
            np.testing.assert_array_equal(bits(held.scales[1]), bits(tensors[file + scale]))
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(base))
    assert memory_plan(policy.config, session.config).always["frozen base"] == live
    assert not any(isinstance(w.value, QTensor) for w in policy.stack.tensors().values())
    assert "quantized anew" not in caplog.text

    moved = policy.stack.q_proj
    moved.weight[...] = moved.value * 1.01
    _, base = split(fp8rl.Session(policy, tokenizer, recipe, **settings).weights)
    q, k = (base.stack.tensors()[name].value for name in ("q_proj", "k_proj"))
    weight = session.recipe.rollout.weight
    expected = jax.jit(lambda x: quantize(x, weight))(moved.value)
    np.testing.assert_array_equal(q.dequantize(), expected.dequantize())
    _, arrays = load_policy_arrays(tmp_path)
    np.testing.assert_array_equal(k.dequantize(), arrays["layers.k_proj.weight"])
    (said,) = [line for line in caplog.messages if "quantized anew" in line]
    assert said.startswith("q_proj: not the numbers that the checkpoint's codes stand for")


def test_what_is_stored_otherwise_is_quantized_anew_and_said(tmp_path, caplog):
    checkpoint(tmp_path, "int4")
    plain, _ = load_model(config_of(tmp_path, "int4-1x64"))
    assert not any(isinstance(w.value, QTensor) for w in plain.stack.tensors().values())
    (said,) = [line for line in caplog.messages if "quantized anew" in line]
    assert "stored as int4, a scale for 1 x 32, not as the int4-1x64" in said
    caplog.clear()
    config = config_of(tmp_path, "int4", excluded=["layers.0.q_proj"])
    some, _ = load_model(config)
    held = [n for n, w in some.stack.tensors().items() if isinstance(w.value, QTensor)]
    assert sorted(held) == sorted(f"{x}_proj" for x in ("k", "v", "o", "gate", "up", "down"))
    # a base in the compute dtype has no use for codes
    plain, _ = load_model(replace(config, lora=LoraConfig(rank=4)))
    assert not any(isinstance(w.value, QTensor) for w in plain.stack.tensors().values())
    assert "quantized anew" not in caplog.text

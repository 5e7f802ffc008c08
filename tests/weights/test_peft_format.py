"""PEFT's files: names, shapes and settings as peft 0.21.2 writes and reads them, and what is
refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_models import MOE, QWEN3

from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.lora import build_adapters, build_norms
from fp8rl_jax.weights.peft_format import load_adapters, save_adapters

LORA = LoraConfig(rank=3, alpha=6.0, targets=("*.q_proj", "*.down_proj"))
# what PeftModel.save_pretrained writes for Qwen3ForCausalLM of these sizes, r = 3, target_modules =
# ["q_proj", "down_proj"]
LAYER = {
    "self_attn.q_proj.lora_A.weight": (3, 48),
    "self_attn.q_proj.lora_B.weight": (96, 3),
    "mlp.down_proj.lora_A.weight": (3, 80),
    "mlp.down_proj.lora_B.weight": (48, 3),
}
SHAPES = {
    f"base_model.model.model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in LAYER.items()
}


def random_adapters(config, lora):
    rng = np.random.default_rng(0)

    def drawn(name, shape):
        return rng.normal(size=shape).astype(np.float32)

    return build_adapters(
        config, lora, lambda name, *shapes: [drawn(name, shape) for shape in shapes]
    ) | build_norms(config, lora, drawn)


@pytest.fixture
def written(tmp_path):
    adapters = random_adapters(QWEN3, LORA)
    return adapters, save_adapters(adapters, tmp_path / "adapter", QWEN3, LORA, "base/model")


def settings(directory) -> dict:
    return json.loads((directory / "adapter_config.json").read_text())


def change(directory, **values) -> None:
    (directory / "adapter_config.json").write_text(json.dumps(settings(directory) | values))


def test_names_shapes_and_settings_are_peft_s(written):
    adapters, directory = written
    tensors = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    np.testing.assert_array_equal(tensors[name], adapters["down_proj"].b.value[1])
    assert sorted(path.name for path in directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base/model",
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": False,
        "target_modules": ["down_proj", "q_proj"],
        "bias": "none",
        "use_dora": False,
    }
    assert settings(directory).items() >= expected.items()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_written_is_read_back(written, dtype):
    adapters, directory = written
    file = directory / "adapter_model.safetensors"
    tensors = {
        name: tensor.astype(dtype) for name, tensor in safetensors.numpy.load_file(file).items()
    }
    safetensors.numpy.save_file(tensors, file)
    change(
        directory,
        lora_alpha=6.0,
        base_model_name_or_path=None,
        revision=None,
        loftq_config={},
        rank_pattern={},
        runtime=1,
    )
    back = load_adapters(directory, QWEN3, LORA)
    assert jax.tree.structure(back) == jax.tree.structure(adapters)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(adapters), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other.astype(dtype).astype(np.float32))


def test_experts_have_a_pair_each_and_target_modules_pick_no_linear_without_an_adapter(tmp_path):
    """MOE's layer 1 is dense, so "up_proj" alone would name linears of both kinds."""
    lora = dataclasses.replace(LORA, targets=("*.experts.up_proj", "*.v_proj"))
    adapters = random_adapters(MOE, lora)
    directory = save_adapters(adapters, tmp_path, MOE, lora)
    tensors = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    experts = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj"
        for layer in (0, 2, 3)
        for expert in range(5)
    ]
    attention = [f"model.layers.{layer}.self_attn.v_proj" for layer in range(4)]
    assert {name.removeprefix("base_model.model.").split(".lora_")[0] for name in tensors} == {
        *experts,
        *attention,
    }
    assert settings(directory)["target_modules"] == sorted([*experts, "v_proj"])
    assert settings(directory)["base_model_name_or_path"] is None
    np.testing.assert_array_equal(
        tensors["base_model.model.model.layers.2.mlp.experts.4.up_proj.lora_A.weight"],
        adapters["experts.up_proj"].a.value[1, 4],
    )
    for one, other in zip(
        jax.tree.leaves(load_adapters(directory, MOE, lora)), jax.tree.leaves(adapters), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_norms_that_are_trained_are_peft_s_modules_to_save(tmp_path):
    """What save_pretrained of peft 0.21.2 writes with modules_to_save = ["input_layernorm",
    "q_norm", "model.norm"]; "norm" alone would take every norm of the model."""
    lora = dataclasses.replace(LORA, norms=("input_layernorm", "q_norm", "norm"))
    adapters = random_adapters(QWEN3, lora)
    directory = save_adapters(adapters, tmp_path, QWEN3, lora)
    assert settings(directory)["modules_to_save"] == ["input_layernorm", "q_norm", "model.norm"]
    assert settings(directory)["target_modules"] == ["down_proj", "q_proj"]
    tensors = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    prefix = "base_model.model.model."
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES | {
        f"{prefix}layers.{i}.{name}.weight": (size,)
        for i in range(2)
        for name, size in (("input_layernorm", 48), ("self_attn.q_norm", 32))
    } | {f"{prefix}norm.weight": (48,)}
    np.testing.assert_array_equal(
        tensors[f"{prefix}layers.1.self_attn.q_norm.weight"], adapters["q_norm"].value[1]
    )
    back = load_adapters(directory, QWEN3, lora)
    assert jax.tree.structure(back) == jax.tree.structure(adapters)
    jax.tree.map(np.testing.assert_array_equal, back, adapters)
    fewer = dataclasses.replace(lora, norms=("input_layernorm", "norm"))
    with pytest.raises(UserError, match="unexpected: model.layers.0.self_attn.q_norm.* lora.norms"):
        load_adapters(directory, QWEN3, fewer)
    with pytest.raises(UserError, match=r"lora.norms = \[\], but the adapter's .* \[\"input_layer"):
        load_adapters(directory, QWEN3, LORA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"r": 4}, "lora.rank = 3, but the adapter has 4"),
        ({"r": "3"}, "r must be an integer"),
        ({"lora_alpha": 8}, "lora.alpha = 6.0, but the adapter has 8.0"),
        ({"use_rslora": True}, "lora.rslora = false, but the adapter has true"),
        ({"use_dora": True}, "use_dora is set; only plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is set"),
        (
            {"modules_to_save": ["lm_head"]},
            r"lora.norms = \[\], but the adapter's modules_to_save are",
        ),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base"),
    ],
)
def test_another_kind_of_adapter_is_refused(written, values, message):
    change(written[1], **values)
    with pytest.raises(UserError, match=message):
        load_adapters(written[1], QWEN3, LORA)


def broken(tensors, name):
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] = np.nan


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop(FIRST),
            "tensors are missing: model.layers.0.self_attn.q_proj.lora_A.weight; lora.targets",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[FIRST]}),
            "tensors are unexpected: lm_head.lora_A",
        ),
        (
            lambda t: t.update({FIRST: t[FIRST].T.copy()}),
            r"q_proj.lora_A.weight has shape \[48, 3\], expected \[3, 48\]",
        ),
        (
            lambda t: t.update({FIRST: np.zeros((3, 48), np.int8)}),
            "q_proj.lora_A.weight has dtype int8",
        ),
        (lambda t: broken(t, FIRST), "q_proj.lora_A.weight holds 1 non-finite values"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(written, damage, message):
    file = written[1] / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    damage(tensors)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        load_adapters(written[1], QWEN3, LORA)


def test_missing_files_and_places_that_cannot_be_written(written, tmp_path):
    adapters, directory = written
    (directory / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"adapter_config.json: cannot be read"):
        load_adapters(directory, QWEN3, LORA)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        save_adapters(adapters, tmp_path / "file", QWEN3, LORA)
    adapters["q_proj"].a.weight.set_value(np.full_like(adapters["q_proj"].a.value, np.inf))
    with pytest.raises(
        UserError,
        match="non-finite values: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ):
        save_adapters(adapters, tmp_path / "other", QWEN3, LORA)
    assert not (tmp_path / "other").exists()

from __future__ import annotations

import dataclasses
import json
import resource

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_models import GEMMA, LLAMA, QWEN3, random_tensors, write_model, write_sharded

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.tensors import parameter_shapes
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.hf_directory import export_policy, load_policy_arrays
from fp8rl_jax.weights.safetensors_io import count_non_finite

FLOATS = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]


def with_head(config, dtype=ml_dtypes.bfloat16):
    tensors = random_tensors(config, dtype)
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}


@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_count_agrees_with_float64(dtype):
    values = np.random.default_rng(0).normal(size=(50, 7)).astype(dtype)
    assert count_non_finite(values) == 0
    values[3, 2] = values[40, 6] = -np.nan
    if not np.isnan(np.float64(np.array(np.inf).astype(dtype))):
        values[0, 0], values[1, 0] = np.inf, -np.inf
    finite = np.isfinite(values.astype(np.float64))
    assert count_non_finite(values) == np.count_nonzero(~finite) >= 2
    assert count_non_finite(values[::2, ::3]) == np.count_nonzero(~finite[::2, ::3])
    largest = np.array([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min], dtype)
    assert count_non_finite(largest) == 0


def test_non_finite_count_crosses_chunks_and_refuses_integers():
    values = np.zeros((1 << 20) + 3, ml_dtypes.bfloat16)
    values[-1] = np.nan
    assert count_non_finite(values) == 1
    with pytest.raises(TypeError, match="int32"):
        count_non_finite(np.zeros(3, np.int32))


@pytest.mark.parametrize("write", [write_model, write_sharded])
@pytest.mark.parametrize("config", [LLAMA, QWEN3])
def test_layers_are_stacked_under_policy_names(config, write, tmp_path):
    tensors = random_tensors(config)
    read, arrays = load_policy_arrays(write(tmp_path, config, tensors))
    assert read == config
    assert {path: array.shape for path, array in arrays.items()} == parameter_shapes(config)
    layer = config.num_layers - 1
    for path, name in {
        "q_proj": "self_attn.q_proj",
        "o_proj": "self_attn.o_proj",
        "down_proj": "mlp.down_proj",
        "post_attention_layernorm": "post_attention_layernorm",
    }.items():
        stacked = arrays[f"layers.{path}.weight"]
        assert stacked.dtype == ml_dtypes.bfloat16
        assert stacked[layer].tobytes() == tensors[f"model.layers.{layer}.{name}.weight"].tobytes()
    assert arrays["norm.weight"].tobytes() == tensors["model.norm.weight"].tobytes()
    assert ("layers.q_norm.weight" in arrays) == (config is QWEN3)
    assert ("lm_head.weight" in arrays) == (config is QWEN3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_file_s_dtype_is_kept(dtype, tmp_path):
    _, arrays = load_policy_arrays(write_model(tmp_path, QWEN3, random_tensors(QWEN3, dtype)))
    assert {array.dtype for array in arrays.values()} == {np.dtype(dtype)}


def test_norms_may_have_a_dtype_of_their_own(tmp_path):
    tensors = random_tensors(QWEN3)
    tensors = {name: t.astype(np.float32) if "norm" in name else t for name, t in tensors.items()}
    _, arrays = load_policy_arrays(write_model(tmp_path, QWEN3, tensors))
    assert arrays["layers.q_norm.weight"].dtype == np.float32
    assert arrays["layers.q_proj.weight"].dtype == ml_dtypes.bfloat16


def test_rotary_buffers_and_a_repeated_tied_head_are_accepted(tmp_path):
    buffers = {
        "model.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    _, arrays = load_policy_arrays(write_model(tmp_path, LLAMA, with_head(LLAMA) | buffers))
    assert "lm_head" not in arrays


def remove(*names):
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def change(name, edit):
    return lambda tensors: tensors | {name: edit(tensors[name].copy())}


def poison(tensor):
    tensor[-1, 3] = np.inf
    return tensor


@pytest.mark.parametrize(
    ("config", "damage", "messages"),
    [
        (QWEN3, remove("model.norm.weight"), ["1 tensors are missing: model.norm.weight"]),
        (QWEN3, remove("lm_head.weight"), ["missing: lm_head.weight", "tie_word_embeddings"]),
        (
            QWEN3,
            lambda tensors: {name: t for name, t in tensors.items() if "layers.1" not in name},
            ["11 tensors are missing: model.layers.1", "and 6 more"],
        ),
        (
            QWEN3,
            lambda tensors: (
                tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(96, np.float32)}
            ),
            ["1 tensors are unexpected: model.layers.0.self_attn.q_proj.bias"],
        ),
        (
            LLAMA,
            change("model.layers.1.mlp.up_proj.weight", lambda t: np.ascontiguousarray(t.T)),
            [
                "model.safetensors: tensor model.layers.1.mlp.up_proj.weight has shape [64, 96]",
                "implies [96, 64]",
            ],
        ),
        (
            LLAMA,
            change("model.layers.1.mlp.up_proj.weight", poison),
            [
                "model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds 1 non-finite "
                "values of 6144"
            ],
        ),
        (
            LLAMA,
            change("model.embed_tokens.weight", poison),
            ["tensor model.embed_tokens.weight holds 1 non-finite"],
        ),
        (
            LLAMA,
            change(
                "model.layers.1.mlp.up_proj.weight", lambda t: t.astype(ml_dtypes.float8_e4m3fn)
            ),
            ["tensor model.layers.1.mlp.up_proj.weight has dtype float8_e4m3fn"],
        ),
        (
            LLAMA,
            change("model.layers.1.mlp.up_proj.weight", lambda t: t.astype(np.float32)),
            [
                "tensor model.layers.1.mlp.up_proj.weight has dtype float32, earlier layers have "
                "bfloat16"
            ],
        ),
        (
            LLAMA,
            lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
            ["tensor lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"],
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_tensor(config, damage, messages, tmp_path):
    write_model(tmp_path, config, damage(random_tensors(config)))
    with pytest.raises(UserError) as error:
        load_policy_arrays(tmp_path)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GEMMA])
def test_export_gives_the_same_file_back(config, tmp_path):
    tensors = random_tensors(config)
    source = write_model(tmp_path / "in", config, tensors)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(json.dumps({"marker": name}))
    (source / "optimizer.pt").write_text("no")
    read, arrays = load_policy_arrays(source)
    target = export_policy(tmp_path / "deep" / "out", read, arrays, tokenizer_from=source)
    written = safetensors.numpy.load_file(target / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert read_policy_config(target) == config
    assert json.loads((target / "tokenizer.json").read_text()) == {"marker": "tokenizer.json"}
    assert sorted(file.name for file in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_export_rounds_float32_to_nearest_even_bf16(tmp_path):
    _, arrays = load_policy_arrays(
        write_model(tmp_path / "in", QWEN3, random_tensors(QWEN3, np.float32))
    )
    weight = arrays["layers.q_proj.weight"]
    weight[0, 0, :4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], np.uint32).view(
        np.float32
    )
    export_policy(tmp_path / "out", QWEN3, arrays)
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    bits = written["model.layers.0.self_attn.q_proj.weight"][0, :4].view(np.uint16)
    assert [hex(b) for b in bits] == ["0x3f80", "0x3f82", "0x3f81", "0xbf80"]
    export_policy(tmp_path / "out32", QWEN3, arrays, dtype="float32")
    _, again = load_policy_arrays(tmp_path / "out32")
    assert again["layers.q_proj.weight"].tobytes() == weight.tobytes()
    assert json.loads((tmp_path / "out32" / "config.json").read_text())["torch_dtype"] == "float32"


def test_export_in_float16(tmp_path):
    _, arrays = load_policy_arrays(
        write_model(tmp_path / "in", QWEN3, random_tensors(QWEN3, np.float32))
    )
    weight = arrays["layers.q_proj.weight"]
    # half steps to the nearest even, a little more to the next
    weight[0, 0, :3] = 1 + np.array([1, 3, 1.001]) * 2.0**-11
    export_policy(tmp_path / "out", QWEN3, arrays, dtype="float16")
    config, again = load_policy_arrays(tmp_path / "out")
    read = again["layers.q_proj.weight"]
    assert read.dtype == np.float16 and list(read[0, 0, :3]) == [1, 1 + 2.0**-9, 1 + 2.0**-10]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"
    weight[0, 0, 0] = 65520
    with pytest.raises(UserError, match=r"1 values of tensor .*q_proj\.weight overflow float16"):
        export_policy(tmp_path / "out", config, arrays, dtype="float16")


def test_export_writes_the_end_tokens_for_generation(tmp_path):
    config = dataclasses.replace(QWEN3, eos_token_ids=(3, 5), pad_token_id=7)
    _, arrays = load_policy_arrays(write_model(tmp_path / "in", config, random_tensors(config)))
    export_policy(tmp_path / "out", config, arrays)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [3, 5], "pad_token_id": 7}


def test_export_refuses_by_name_and_leaves_the_last_export(tmp_path):
    _, arrays = load_policy_arrays(
        write_model(tmp_path / "in", QWEN3, random_tensors(QWEN3, np.float32))
    )
    target = export_policy(tmp_path / "out", QWEN3, arrays)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    weight = arrays["layers.v_proj.weight"]
    kept = weight[1, 2, 3]
    for value, message in [
        (np.nan, "tensor model.layers.1.self_attn.v_proj.weight holds 1 non-finite values"),
        (3.4e38, "1 values of tensor model.layers.1.self_attn.v_proj.weight overflow bfloat16"),
    ]:
        weight[1, 2, 3] = value
        with pytest.raises(UserError, match=message):
            export_policy(target, QWEN3, arrays)
    weight[1, 2, 3] = kept
    with pytest.raises(UserError, match="'float64' cannot be exported"):
        export_policy(target, QWEN3, arrays, dtype="float64")
    with pytest.raises(UserError, match="parameters are missing: norm.weight"):
        export_policy(
            target, QWEN3, {key: value for key, value in arrays.items() if key != "norm.weight"}
        )
    with pytest.raises(UserError, match="parameters are unexpected: lm_head.weight"):
        export_policy(target, dataclasses.replace(QWEN3, tie_word_embeddings=True), arrays)
    with pytest.raises(UserError, match=r"parameter embed_tokens.weight has shape \[40, 48\]"):
        export_policy(target, dataclasses.replace(QWEN3, vocab_size=41), arrays)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            export_policy(target, QWEN3, arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


def test_export_to_a_file_s_name_is_one_line(tmp_path):
    _, arrays = load_policy_arrays(write_model(tmp_path / "in", QWEN3, random_tensors(QWEN3)))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="out: cannot be written"):
        export_policy(tmp_path / "out", QWEN3, arrays)

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GEMMA, LLAMA, MOE, QWEN2, QWEN3, random_tensors, write_model

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision import quantize
from fp8rl_jax.weights.block_fp8 import dequantize_tensor, unaligned_linears
from fp8rl_jax.weights.hf_config import config_json, read_policy_config
from fp8rl_jax.weights.hf_directory import export_policy, load_policy_arrays
from fp8rl_jax.weights.load import load_policy
from fp8rl_jax.weights.quantized_export import export_form, quantized_tensors
from fp8rl_jax.weights.safetensors_io import read_checkpoint

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
# whole blocks and parts of blocks
WIDE = dataclasses.replace(QWEN3, hidden_size=160, intermediate_size=200, num_layers=1)
BLOCKS = export_form("fp8-block")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def block_scales(weight: np.ndarray, block: int = 128) -> np.ndarray:
    """amax / 448 of each block, in float64."""
    rows, columns = (range(0, size, block) for size in weight.shape)
    wide = np.abs(weight.astype(np.float64))
    return (
        np.array([[wide[i : i + block, j : j + block].max() for j in columns] for i in rows]) / 448
    )


def spread(scales: np.ndarray, shape: tuple[int, int], block: int = 128) -> np.ndarray:
    return np.kron(scales, np.ones((block, block)))[: shape[0], : shape[1]]


def exported(config, tmp_path, **options):
    source = write_model(tmp_path / "in", config, random_tensors(config, np.float32))
    read, arrays = load_policy_arrays(source)
    return export_policy(tmp_path / "out", read, arrays, "fp8-block", **options), arrays


@pytest.mark.parametrize(
    "config", [WIDE, MOE, QWEN2, GEMMA], ids=["qwen3", "moe", "qwen2", "gemma3"]
)
def test_linears_are_e4m3_with_a_float32_scale_for_each_block_and_the_rest_is_bf16(
    config, tmp_path
):
    directory, _ = exported(config, tmp_path)
    source = random_tensors(config, np.float32)
    tensors = read_checkpoint(directory).tensors
    linears = [
        name for name in source if name.split(".")[-2] in LINEARS and name.endswith(".weight")
    ]
    assert {name for name in tensors if name.endswith("_scale_inv")} == {
        f"{name}_scale_inv" for name in linears
    }
    assert tensors.keys() - {f"{name}_scale_inv" for name in linears} == source.keys()
    for name, weight in source.items():
        if name not in linears:
            rounded = weight.astype(BF16)
            assert tensors[name].dtype == BF16 and tensors[name].tobytes() == rounded.tobytes()
            continue
        values, scales = tensors[name], tensors[f"{name}_scale_inv"]
        assert values.dtype == E4M3 and values.shape == weight.shape and scales.dtype == np.float32
        np.testing.assert_allclose(scales, block_scales(weight), rtol=2e-7)
        scaled = weight.astype(np.float64) / spread(scales.astype(np.float64), weight.shape)
        # ties differ by what float32 keeps of the ratio
        nearest = scaled.astype(np.float32).astype(E4M3).astype(np.float64)
        close = np.abs(values.astype(np.float64) - scaled) <= np.abs(
            nearest - scaled
        ) + 1e-5 * np.abs(scaled)
        assert close.all()
        q = quantize(jnp.asarray(weight), RECIPES["fp8-rl"].rollout.weight)
        assert (
            values.tobytes() == np.asarray(q.values).tobytes()
            and scales.tobytes() == np.asarray(q.scales).tobytes()
        )


def test_config_json_says_how_the_weights_are_stored(tmp_path):
    directory, _ = exported(MOE, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.layers.0.mlp.gate",
            "model.layers.2.mlp.gate",
            "model.layers.3.mlp.gate",
        ],
    }
    assert read_policy_config(directory) == MOE


def test_an_fp8_checkpoint_is_read_as_values_times_scales(tmp_path):
    directory, _ = exported(WIDE, tmp_path)
    stored = read_checkpoint(directory).tensors
    _, arrays = load_policy_arrays(directory)
    name = "model.layers.0.mlp.down_proj.weight"
    exact = stored[name].astype(np.float64) * spread(
        stored[f"{name}_scale_inv"].astype(np.float64), stored[name].shape
    )
    assert np.array_equal(arrays["layers.down_proj.weight"][0], exact.astype(np.float32))
    assert arrays["layers.down_proj.weight"].dtype == np.float32
    assert arrays["embed_tokens.weight"].dtype == BF16
    policy = load_policy(directory, jnp.bfloat16)
    assert np.array_equal(
        np.asarray(policy.layers.tensors()["down_proj"].value[0]),
        exact.astype(np.float32).astype(BF16),
    )


def test_a_second_export_has_the_bits_of_the_first(tmp_path):
    source = write_model(tmp_path / "in", WIDE, random_tensors(WIDE, BF16))

    def export(model, name, form):
        main(["export", "--model", str(model), "--output", str(tmp_path / name), "--format", form])
        return tmp_path / name

    first = export(source, "first", "fp8-block")
    for form in ("fp8-block", "bf16"):
        again = export(export(first, form, form), f"{form}-again", "fp8-block")
        files = [(path / "model.safetensors").read_bytes() for path in (again, first)]
        assert files[0] == files[1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-110, 110), spread=st.integers(0, 12))
def test_requantizing_what_was_dequantized_moves_no_bit(seed, exponent, spread):
    """Over nearly all of bf16's range, and for weights that lie on several e4m3 binades, its
    subnormals included."""
    rng = np.random.default_rng(seed)
    weight = (
        rng.normal(size=(3, 130)) * 2.0 ** rng.uniform(-spread, 0, (3, 130)) * 2.0**exponent
    ).astype(BF16)
    values, scales = quantized_tensors("w", weight, BLOCKS).values()
    restored = dequantize_tensor(values, scales, (128, 128))
    again = [*quantized_tensors("w", restored.astype(BF16), BLOCKS).values()]
    assert again[0].tobytes() == values.tobytes() and again[1].tobytes() == scales.tobytes()
    # 448 scales need not give the scale again in float32, but its neighbour
    again = [*quantized_tensors("w", restored, BLOCKS).values()]
    assert again[0].tobytes() == values.tobytes()
    np.testing.assert_allclose(again[1], scales, rtol=2.0**-23)


def write_quantized(directory, config, tensors, **changes):
    write_model(directory, config, tensors)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]} | changes
    (directory / "config.json").write_text(
        json.dumps(config_json(config) | {"quantization_config": quantization})
    )


def fp8_tensors(config):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = random_tensors(config)
    return tensors | {
        name: tensors[name].astype(E4M3),
        f"{name}_scale_inv": np.ones((1, 1), np.float32),
    }


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, n: t.pop(f"{n}_scale_inv"), "up_proj.weight is FP8, but its scale"),
        (
            lambda t, n: t.update({f"{n}_scale_inv": np.ones((2, 1), np.float32)}),
            "has shape [2, 1]; a weight [96, 64] in blocks",
        ),
        (
            lambda t, n: t.update({f"{n}_scale_inv": np.ones((1, 1), np.int8)}),
            "has dtype int8; scales must be",
        ),
        (
            lambda t, n: t.update({f"{n}_scale_inv": np.full((1, 1), 255, np.uint8)}),
            "holds 1 non-finite scales of 1",
        ),
        (
            lambda t, n: t.update({f"{n}_scale": np.ones((1, 1), np.float32)}),
            "has two scales, model.layers.1.mlp.up_proj.weight_scale_inv and",
        ),
        (
            lambda t, n: t.update({f"{n}_scale_inv": np.full((1, 1), np.inf, np.float32)}),
            "holds 1 non-finite scales of 1",
        ),
        (
            lambda t, n: t.update({f"{n}_scale_inv": np.full((1, 1), 3e38, np.float32)}),
            "up_proj.weight holds",
        ),
        (
            lambda t, n: t.update({n: np.full((96, 64), np.nan, E4M3)}),
            "up_proj.weight holds 6144 non-finite values of 6144",
        ),
        (
            lambda t, n: t.update({n: t[n].astype(np.float32)}),
            "up_proj.weight_scale_inv is the scale of a tensor that is not",
        ),
        (
            lambda t, n: t.update({n: t[n][:64]}),
            "up_proj.weight has shape [64, 64], config.json implies [96, 64]",
        ),
        (
            lambda t, n: t.update({"model.norm.weight": t["model.norm.weight"].astype(E4M3)}),
            "norm.weight has dtype float8",
        ),
        (
            lambda t, n: t.update({"a_scale_inv": np.ones(1, np.float32)}),
            "tensor a_scale_inv is the scale of",
        ),
    ],
)
def test_damaged_fp8_checkpoints_are_refused_by_tensor(edit, message, tmp_path):
    tensors = fp8_tensors(LLAMA)
    edit(tensors, "model.layers.1.mlp.up_proj.weight")
    write_quantized(tmp_path, LLAMA, tensors)
    with pytest.raises(UserError) as error:
        load_policy_arrays(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/model.safetensors: ") and message in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_fp8_weights_without_a_quantization_config_are_refused(tmp_path):
    tensors = fp8_tensors(LLAMA)
    write_model(tmp_path, LLAMA, tensors)
    with pytest.raises(UserError, match="unexpected: model.layers.1.mlp.up_proj.weight_scale_inv"):
        load_policy_arrays(tmp_path)


def test_sides_that_other_readers_refuse_are_listed():
    aligned = dataclasses.replace(
        QWEN3, hidden_size=256, intermediate_size=384, num_heads=4, num_kv_heads=4
    )
    assert unaligned_linears(aligned) == []
    assert unaligned_linears(dataclasses.replace(aligned, intermediate_size=400)) == [
        "gate_proj [400, 256]",
        "up_proj [400, 256]",
        "down_proj [256, 400]",
    ]


def test_large_exports_are_sharded_and_replace_each_other(tmp_path):
    config, arrays = load_policy_arrays(write_model(tmp_path / "in", LLAMA, random_tensors(LLAMA)))
    target = tmp_path / "out"
    (target / "notes").mkdir(parents=True)
    for dtype in ("bfloat16", "fp8-block"):
        whole = export_policy(tmp_path / dtype, config, arrays, dtype)
        export_policy(target, config, arrays, dtype, shard_bytes=40_000)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert (
            files
            == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
            and len(files) > 2
        )
        assert sorted(f.name for f in target.glob("*.safetensors")) == files
        if dtype == "bfloat16":
            shards = [safetensors.numpy.load_file(target / file) for file in files]
            sizes = [sum(t.nbytes for t in shard.values()) for shard in shards]
            assert max(sizes) <= 40_000 and sum(sizes) == index["metadata"]["total_size"]
        else:  # a scale lies beside its weight
            places = index["weight_map"]
            assert all(
                places[name] == places[name.removesuffix("_scale_inv")]
                for name in places
                if name.endswith("_inv")
            )
        expected, got = (load_policy_arrays(d)[1] for d in (whole, target))
        assert all(got[path].tobytes() == expected[path].tobytes() for path in expected)
    export_policy(target, config, arrays)
    assert [f.name for f in target.glob("*.safetensors*")] == ["model.safetensors"] and (
        target / "notes"
    ).is_dir()

"""FP8 checkpoints in the forms that others write: a weight is its value times its scale, in float64;
what is not read is refused by name.

Each form's values were compared once, bit for bit, with what transformers 5.24 (Fp8Dequantize) and
compressed-tensors 0.20 (decompress) make of the same bytes (where its bfloat16 can hold them).
"""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from tiny_models import MOE, QWEN3, random_tensors, write_model

from fp8rl_jax.errors import UserError
from fp8rl_jax.weights.hf_config import config_json, parse_config
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.layouts import Layout, parse_quantization

E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
WIDE = dataclasses.replace(QWEN3, hidden_size=160, intermediate_size=200, num_layers=2)
UP, DOWN = (f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj"))
LAYER = "model.layers.0."


def write(directory, config, tensors, quantization, key="quantization_config"):
    write_model(directory, config, tensors)
    (directory / "config.json").write_text(json.dumps(config_json(config) | {key: quantization}))
    return directory


def scales_of(shape, dtype):
    """Positive scales; of the two kinds of E8M0, the smallest that there is among them."""
    rng = np.random.default_rng(len(shape))
    if dtype in (E8M0, np.uint8):
        exponents = rng.integers(100, 140, shape, np.uint8)
        exponents.reshape(-1)[0] = 0
        return exponents.view(dtype)
    return np.asarray(rng.uniform(2**-9, 2**-7, shape)).astype(dtype)


def in_float64(values, scales, block):
    """Block by block, from the bytes of the scales where these are E8M0."""
    if scales.dtype in (E8M0, np.uint8):
        scales = 2.0 ** (scales.view(np.uint8).astype(np.float64) - 127)
    scales = scales.astype(np.float64)
    rows, columns = (np.arange(size) for size in values.shape)
    rows = rows // block[0] if block[0] else 0 * rows
    columns = columns // block[1] if block[1] else 0 * columns
    counts = rows[-1] + 1, columns[-1] + 1
    return values.astype(np.float64) * scales.reshape(counts)[np.ix_(rows, columns)]


def fp8(**changes):
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | changes


def compressed(form="float-quantized", **weights):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
UE8M0 = fp8(weight_block_size=[128, 128], scale_fmt="ue8m0")
BLOCKS, WHOLE, CHANNEL = (128, 128), (None, None), (1, None)
FORMS = {
    # quantization_config, block, shape of the scales of [200, 160], their dtype and name
    "64x32, bf16": (fp8(weight_block_size=[64, 32]), (64, 32), (4, 5), BF16, "weight_scale_inv"),
    "ue8m0": (UE8M0, BLOCKS, (2, 2), E8M0, "weight_scale_inv"),
    "ue8m0 as bytes": (UE8M0, BLOCKS, (2, 2), np.uint8, "weight_scale_inv"),
    "ue8m0, vLLM's name": (UE8M0, BLOCKS, (2, 2), E8M0, "weight_scale"),
    "DeepSeek-V4's name": (UE8M0, BLOCKS, (2, 2), E8M0, "scale"),
    "no block given": (fp8(), BLOCKS, (2, 2), np.float32, "weight_scale_inv"),
    "AutoFP8": (fp8(activation_scheme="static"), WHOLE, (), np.float32, "weight_scale"),
    "Ministral": (fp8(weight_block_size=None), WHOLE, (), BF16, "weight_scale_inv"),
    "one number, blocks said": (fp8(), WHOLE, (1, 1), np.float32, "weight_scale_inv"),
    "one a row, blocks said": (fp8(), CHANNEL, (200, 1), np.float32, "weight_scale_inv"),
    "one a row, one said": (fp8(weight_block_size=None), CHANNEL, (200, 1), BF16, "weight_scale"),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, CHANNEL, (200, 1), np.float32, "weight_scale"),
    "ModelOpt": (MODELOPT, WHOLE, (), np.float32, "weight_scale"),
    "tensor": (compressed(strategy="tensor"), WHOLE, (1,), BF16, "weight_scale"),
    "tensor, implied": (compressed(), WHOLE, (1,), BF16, "weight_scale"),
    "channel": (compressed(strategy="channel"), CHANNEL, (200, 1), np.float16, "weight_scale"),
    "channel, flat": (compressed(group_size=-1), CHANNEL, (200,), BF16, "weight_scale"),
    "block": (
        compressed(strategy="block", block_structure=[128, 128]),
        BLOCKS,
        (2, 2),
        BF16,
        "weight_scale",
    ),
    "MXFP8": (
        compressed("mxfp8-quantized", strategy="group", group_size=32),
        (1, 32),
        (200, 5),
        np.uint8,
        "weight_scale",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_its_value_times_its_scale(form, tmp_path):
    quantization, block, shape, dtype, name = FORMS[form]
    tensors = random_tensors(WIDE)
    scales = scales_of(shape, dtype)
    tensors |= {UP: tensors[UP].astype(E4M3), f"{UP.removesuffix('weight')}{name}": scales}
    _, arrays = load_policy_arrays(write(tmp_path, WIDE, tensors, quantization))
    up = arrays["layers.up_proj.weight"]
    assert np.array_equal(up[0], in_float64(tensors[UP], scales, block).astype(np.float32))
    # what is left in bf16, which config.json may list, is as it was
    assert np.array_equal(up[1], tensors[UP.replace("0", "1")].astype(np.float32))
    assert arrays["layers.q_proj.weight"].dtype == BF16


def test_scales_of_activations_and_of_the_cache_are_named_and_not_used(tmp_path, caplog):
    tensors = random_tensors(WIDE) | {
        f"{LAYER}{name}": np.full((), 3, np.float32)
        for name in (
            "mlp.up_proj.input_scale",
            "mlp.up_proj.activation_scale",
            "mlp.up_proj.input_scale_ub",
            "self_attn.k_scale",
            "self_attn.v_scale",
            "self_attn.kv_scale",
            "self_attn.attn.k_scale",
            "self_attn.k_proj.k_scale",
            "self_attn.v_proj.output_scale",
            "self_attn.k_zero_point",
        )
    }
    write(tmp_path, WIDE, tensors, fp8())
    _, arrays = load_policy_arrays(tmp_path)
    assert arrays["layers.up_proj.weight"].dtype == BF16
    assert caplog.text.count("not used, a run measures its own") == 1
    assert "mlp.up_proj.input_scale" in caplog.text and "and 5 more" in caplog.text


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path):
    tensors = random_tensors(WIDE)
    tensors |= {UP: tensors[UP].astype(E4M3), f"{UP}_scale": np.array(0.5, np.float32)}
    write_model(tmp_path, WIDE, tensors)
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    _, arrays = load_policy_arrays(tmp_path)
    assert np.array_equal(
        arrays["layers.up_proj.weight"][0], tensors[UP].astype(np.float32) * np.float32(0.5)
    )
    write(tmp_path, WIDE, tensors, fp8(weight_block_size=[128, 128]))
    with pytest.raises(
        UserError, match="hf_quant_config.json: contradicts the quantization_config"
    ):
        load_policy_arrays(tmp_path)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(UserError, match="hf_quant_config.json: .*quant_algo 'W4A8_AWQ' is not"):
        load_policy_arrays(tmp_path)


def edited(quantization, **changes):
    group = quantization["config_groups"]["group_0"]
    return quantization | {"config_groups": {"group_0": group, "group_1": group | changes}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, ".quant_method 'gptq' is not read"),
        ({"quant_method": "awq", "bits": 4}, ".quant_method 'awq' is not read"),
        ({"quant_method": "bitsandbytes"}, ".quant_method 'bitsandbytes' is not read"),
        ({"quant_method": "mxfp4"}, ".quant_method 'mxfp4' is not read"),
        ({"quant_method": None, "bits": 4}, ".quant_method None is not read"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, ".quant_algo 'INT4_AWQ' is not"),
        (fp8(fmt="e5m2"), ".fmt 'e5m2' is not read"),
        (fp8(expert_dtype="fp4"), ".expert_dtype 'fp4' is not read"),
        (fp8(activation_scheme="odd"), ".activation_scheme 'odd' is not read"),
        (fp8(scale_fmt="e5m2"), ".scale_fmt 'e5m2' is not read"),
        (fp8(weight_block_size=[128, 0]), "must be two positive sizes, got [128, 0]"),
        (fp8(weight_block_size="128"), "weight_block_size must be an integer or a list"),
        ("fp8", " must be an object"),
        (compressed("int-quantized", type="int"), ".format 'int-quantized' is not read"),
        (compressed("nvfp4-pack-quantized"), ".type 'float' in 8 bits is not read"),
        (compressed(type="int"), ".config_groups.group_0.weights.type 'int' in 8 bits is not read"),
        (compressed(symmetric=False), ".group_0.weights.symmetric false is not read"),
        (compressed(strategy="tensor_group"), ".group_0.weights.strategy 'tensor_group' is not"),
        (compressed(strategy="group"), ".group_0.weights.group_size must be positive, got None"),
        (
            compressed(strategy="block", block_structure=[0, 128]),
            ".group_0.weights.block_structure must be two positive sizes",
        ),
        (
            edited(compressed(), weights={"type": "float", "strategy": "channel"}),
            "group_0 and group_1 store weights in blocks of all x all (e4m3) and of 1 x all",
        ),
        (
            edited(compressed(), format="pack-quantized"),
            ".group_1.weights.type 'float' in 8 bits is",
        ),
        (
            compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            ".sparsity_config.format 'sparse-24-bitmask' is not read",
        ),
        (
            compressed() | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            ".transform_config is not read",
        ),
    ],
)
def test_other_quantization_is_refused_by_name(quantization, message):
    with pytest.raises(UserError) as error:
        parse_config(config_json(QWEN3) | {"quantization_config": quantization}, "config.json")
    assert str(error.value).startswith("config.json: quantization_config") and message in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_the_old_key_of_compressed_tensors_counts_where_it_says_the_same():
    new, old = compressed(strategy="channel"), compressed(strategy="tensor")
    assert parse_quantization({}) is parse_quantization({"quantization_config": None}) is None
    assert parse_quantization({"compression_config": new}) == Layout("e4m3", (1, None))
    old = compressed(strategy="block", block_structure="128x64")
    assert parse_quantization({"quantization_config": old}) == Layout("e4m3", (128, 64))
    for cache_only in (compressed() | {"config_groups": {}}, {**MODELOPT, "quant_algo": None}):
        assert parse_quantization({"quantization_config": cache_only}) is None
    both = parse_quantization({"compression_config": new, "quantization_config": new})
    assert both == Layout("e4m3", (1, None))
    with pytest.raises(UserError, match="quantization_config and compression_config differ"):
        parse_quantization({"compression_config": old, "quantization_config": new})


BASE = "model.layers.{}.mlp.experts."  # MOE: layers 0, 2 and 3 have 5 experts, I = 24, H = 48


def of_experts(tensors, layer, name, experts=5):
    return np.stack([tensors[f"{BASE.format(layer)}{e}.{name}.weight"] for e in range(experts)])


def fuse(tensors, layer):
    """As transformers 5's Qwen3MoeExperts holds them, and writes under save_original_format=False."""
    base = BASE.format(layer)
    gate, up = (of_experts(tensors, layer, name) for name in ("gate_proj", "up_proj"))
    rest = {name: t for name, t in tensors.items() if not name.startswith(base)}
    return rest | {
        f"{base}gate_up_proj": np.concatenate([gate, up], axis=1),
        f"{base}down_proj": of_experts(tensors, layer, "down_proj"),
    }


def test_fused_experts_are_the_experts(tmp_path):
    tensors = random_tensors(MOE)
    _, expected = load_policy_arrays(write_model(tmp_path / "single", MOE, tensors))
    for layers in ((0, 2, 3), (2,)):
        fused = tensors
        for layer in layers:
            fused = fuse(fused, layer)
        _, arrays = load_policy_arrays(write_model(tmp_path / "fused", MOE, fused))
        assert all(arrays[path].tobytes() == expected[path].tobytes() for path in expected)


@pytest.mark.parametrize(
    ("block", "gate_up", "down"),
    [
        ((16, 32), (4, 2), (3, 1)),  # gate and up in blocks of their own, the last 8 rows high
        ((16, 32), (3, 2), (3, 1)),  # one matrix: the second block has rows of both
        ((24, 48), (2, 1), (2, 1)),
        ((128, 128), (2, 1), (1, 1)),
        ((128, 128), (1, 1), (1, 1)),
        (None, (2, 1), (1, 1)),
        (None, (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, E8M0])
def test_fused_experts_in_fp8(block, gate_up, down, dtype, tmp_path):
    tensors, base = fuse(random_tensors(MOE), 2), BASE.format(2)
    stored = {name: tensors[base + name].astype(E4M3) for name in ("gate_up_proj", "down_proj")}
    scales = {
        "gate_up_proj": scales_of((5, *gate_up), dtype),
        "down_proj": scales_of((5, *down), dtype),
    }
    tensors |= {base + name: values for name, values in stored.items()}
    tensors |= {f"{base}{name}_scale_inv": values for name, values in scales.items()}
    write(tmp_path, MOE, tensors, fp8(weight_block_size=block and list(block)))
    _, arrays = load_policy_arrays(tmp_path)
    sides = block or WHOLE
    for e in range(5):
        values, scale = stored["gate_up_proj"][e], scales["gate_up_proj"][e]
        if gate_up[0] % 2:
            halves = np.split(in_float64(values, scale, sides), 2)
        else:
            halves = [
                in_float64(v, s, sides)
                for v, s in zip(np.split(values, 2), np.split(scale, 2), strict=True)
            ]
        whole = in_float64(stored["down_proj"][e], scales["down_proj"][e], sides)
        for name, exact in zip(
            ("gate_proj", "up_proj", "down_proj"), (*halves, whole), strict=True
        ):
            array = arrays[f"layers.experts.{name}.weight"][1, e]
            assert np.array_equal(array, exact.astype(np.float32)), name


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t, b: t.update({f"{b}down_proj": t[f"{b}down_proj"].swapaxes(1, 2).copy()}),
            "experts.down_proj has shape [5, 24, 48], config.json implies [5, 48, 24]",
        ),
        (
            lambda t, b: t.update({f"{b}down_proj": t[f"{b}down_proj"][:4]}),
            "experts.down_proj has shape [4, 48, 24], config.json implies [5, 48, 24]",
        ),
        (
            lambda t, b: t.update({f"{b}3.up_proj.weight": np.zeros((24, 48), BF16)}),
            "1 tensors are unexpected: model.layers.2.mlp.experts.3.up_proj.weight",
        ),
        (lambda t, b: t.pop(f"{b}gate_up_proj"), "experts.0.gate_proj.weight"),
        (
            lambda t, b: t.update({f"{b}down_proj": np.full((5, 48, 24), np.nan, BF16)}),
            "experts.down_proj holds 5760 non-finite values of 5760",
        ),
        (
            lambda t, b: t.update({f"{b}down_proj": t[f"{b}down_proj"].astype(E4M3)}),
            "experts.down_proj has dtype float8_e4m3fn, and no scale belongs to it",
        ),
    ],
)
def test_damaged_fused_experts_are_refused_by_tensor(edit, message, tmp_path):
    tensors = fuse(random_tensors(MOE), 2)
    edit(tensors, BASE.format(2))
    with pytest.raises(UserError) as error:
        load_policy_arrays(write_model(tmp_path, MOE, tensors))
    assert message in str(error.value) and "\n" not in str(error.value)

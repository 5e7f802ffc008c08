"""NVFP4, MX and INT4 checkpoints: as compressed-tensors 0.20 and ModelOpt 0.47 write them (tables of
tests/precision/oracles) they are read to the values that these compute; what is written is read back
to what the rollout serves; what is damaged is refused by tensor."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_models import LLAMA, MOE, QWEN3, random_tensors, write_model

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import linear_names
from fp8rl_jax.weights.hf_config import config_json
from fp8rl_jax.weights.hf_directory import export_policy, load_policy_arrays
from fp8rl_jax.weights.layouts import read_quantization
from fp8rl_jax.weights.load import load_policy, rollout_form
from fp8rl_jax.weights.quantized_export import export_form, quantized_tensors
from fp8rl_jax.weights.safetensors_io import read_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "precision" / "oracles"))
import tables  # noqa: E402

BF16, E4M3, E8M0 = (
    np.dtype(x) for x in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu)
)
K = "model.layers.0.self_attn.k_proj"
CHECKPOINTS, INT4 = tables.load("checkpoints"), tables.load("int4")


def write(directory, config, tensors, quantization):
    write_model(directory, config, tensors)
    (directory / "config.json").write_text(json.dumps(config_json(config) | quantization))
    return directory


def with_linear(config, parts, weight=f"{K}.weight"):
    """Random tensors, and the parts of one linear in place of its weight."""
    tensors = random_tensors(config)
    del tensors[weight]
    return tensors | {weight.removesuffix("weight") + part: x for part, x in parts.items()}


def packed(form, **weights):
    """The `quantization_config` of compressed-tensors."""
    weights = {"symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "version": "0.20.0",
            "format": form,
            "config_groups": {"group_0": group},
        }
    }


INTEGERS = {"num_bits": 4, "type": "int"}
FORMS = {
    "nvfp4": packed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
    "mxfp4": packed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
    "int4": packed("pack-quantized", **INTEGERS, strategy="group", group_size=32),
}


def oracle(library, preset):
    found = CHECKPOINTS[library][preset]
    parts = {name.split(".")[-1]: x for name, x in found["tensors"].items()}
    return parts, found["config"], found["dequantized"]


@pytest.mark.parametrize(
    ("library", "preset", "layout"),
    [
        ("compressed-tensors", "NVFP4", "nvfp4, a scale for 1 x 16"),
        ("compressed-tensors", "MXFP8", "mxfp8, a scale for 1 x 32"),
        ("compressed-tensors", "MXFP6A16", "mxfp6, a scale for 1 x 32"),
        ("compressed-tensors", "MXFP4", "mxfp4, a scale for 1 x 32"),
        ("compressed-tensors", "W4A16", "int4, a scale for 1 x 32"),
        ("modelopt", "NVFP4_DEFAULT_CFG", "nvfp4, a scale for 1 x 16"),
        ("modelopt", "MXFP8_DEFAULT_CFG", "mxfp8, a scale for 1 x 32"),
    ],
)
def test_other_libraries_checkpoints_have_their_values(library, preset, layout, tmp_path, caplog):
    """They compute in bfloat16, where exact products of an INT4 code and its scale are rounded. Of
    W4A4 the weights are read, and it is said that the scale of the inputs is not used."""
    parts, config, expected = oracle(library, preset)
    write(tmp_path, LLAMA, with_linear(LLAMA, parts), config)
    assert str(read_quantization(tmp_path)) == layout
    _, arrays = load_policy_arrays(tmp_path)
    value = arrays["layers.k_proj.weight"][0]
    assert value.dtype == np.float32
    # ModelOpt drops the sign of a zero
    assert np.array_equal(value.astype(BF16), expected)
    inputs = [f"{K}.{name}" for name in parts if name.startswith("input")]
    assert len(inputs) == (layout[:5] == "nvfp4")
    said = "have an outer scale a row, not one a linear): "
    assert [line.partition(said)[2] for line in caplog.messages] == inputs


def test_weights_alone_and_modelopts_own_file_say_the_same(tmp_path):
    parts, _, expected = oracle("compressed-tensors", "NVFP4")
    found = CHECKPOINTS["compressed-tensors"]["NVFP4A16"]
    alone = {name: parts[name] for name in (x.split(".")[-1] for x in found["tensors"])}
    write(tmp_path / "alone", LLAMA, with_linear(LLAMA, alone), found["config"])
    parts, _, theirs = oracle("modelopt", "NVFP4_DEFAULT_CFG")
    found = CHECKPOINTS["modelopt"]["W4A16_NVFP4_CFG"]
    single = {name: parts[name] for name in (x.split(".")[-1] for x in found["tensors"])}
    write(tmp_path / "beside", LLAMA, with_linear(LLAMA, single), {})
    beside = tmp_path / "beside" / "hf_quant_config.json"
    beside.write_text(json.dumps(found["hf_quant_config.json"]))
    older = {"quantization_config": {"quant_method": "modelopt", **found["hf_quant_config.json"]}}
    write(tmp_path / "older", LLAMA, with_linear(LLAMA, single), older)
    for name, value in (("alone", expected), ("beside", theirs), ("older", theirs)):
        read = load_policy_arrays(tmp_path / name)[1]["layers.k_proj.weight"][0]
        assert np.array_equal(read.astype(BF16), value), name


@pytest.mark.parametrize(
    "case", ["bfloat16 32", "bfloat16 128", "float32 32", "slime", "channel", "channel, flat"]
)
def test_int4_of_any_group(case, tmp_path):
    """Codes times scales, exact in float32; compressed-tensors' own sums where it rounds nothing."""
    if case == "slime":
        found = INT4["slime"]["bfloat16 32"]
    elif case.startswith("channel"):  # by hand: a scale a row
        found = dict(INT4["compressed-tensors"]["bfloat16 32"])
        found["weight_scale"] = found["weight_scale"][:, :1].copy()
        found["dequantized"] = found["codes"].astype(BF16) * found["weight_scale"]
        if case.endswith("flat"):
            found["weight_scale"] = found["weight_scale"].reshape(-1)
    else:
        found = INT4["compressed-tensors"][case]
    rows, columns = found["codes"].shape
    config = dataclasses.replace(
        LLAMA, hidden_size=columns, num_heads=1, num_kv_heads=1, head_dim=rows, num_layers=1
    )
    group = -1 if "channel" in case else columns // found["weight_scale"].shape[1]
    quantization = packed("pack-quantized", **INTEGERS, group_size=group)
    parts = {name: x for name, x in found.items() if name.startswith("weight")}
    _, arrays = load_policy_arrays(
        write(tmp_path, config, with_linear(config, parts), quantization)
    )
    value, scale = arrays["layers.k_proj.weight"][0], found["weight_scale"].astype(np.float32)
    scale = np.repeat(scale.reshape(rows, -1), columns // scale.reshape(rows, -1).shape[1], axis=1)
    assert np.array_equal(value, found["codes"] * scale)
    stored = found["dequantized"]
    assert value.astype(stored.dtype).tobytes() == stored.tobytes()


def test_columns_that_fill_no_word_and_the_lowest_code(tmp_path):
    """48 columns in a group of 12 a word and a half; -8 is a code that is never written here."""
    config = dataclasses.replace(QWEN3, hidden_size=12, num_layers=1)
    codes = np.arange(32 * 12).reshape(32, 12) % 16 - 8
    words = np.zeros((32, 2), np.uint32)
    for column in range(12):
        words[:, column // 8] |= (codes[:, column] + 8).astype(np.uint32) << 4 * (column % 8)
    scale = np.full((32, 3), 0.5, np.float16)
    parts = {"weight_packed": words.view(np.int32), "weight_scale": scale}
    quantization = packed("pack-quantized", **INTEGERS, strategy="group", group_size=4)
    write(tmp_path, config, with_linear(config, parts), quantization)
    value = load_policy_arrays(tmp_path)[1]["layers.k_proj.weight"][0]
    assert np.array_equal(value, codes / 2) and codes.min() == -8


EXPERTS = dataclasses.replace(
    MOE,
    hidden_size=64,
    intermediate_size=96,
    experts=dataclasses.replace(MOE.experts, intermediate_size=32),
)


@pytest.mark.parametrize(("form", "between"), [("nvfp4", ""), ("int4", ".weight"), ("mxfp4", "")])
def test_fused_experts_are_the_experts(form, between, tmp_path):
    """Parts of single experts, and the same stacked beside the fused tensors."""
    source = write_model(tmp_path / "in", EXPERTS, random_tensors(EXPERTS))
    single = export_policy(tmp_path / "single", *load_policy_arrays(source), form)
    tensors, expected = dict(read_checkpoint(single).tensors), load_policy_arrays(single)[1]
    for layer in EXPERTS.sparse_layers:
        base = f"model.layers.{layer}.mlp.experts."

        def stacked(name, part, base=base):
            return np.stack([tensors.pop(f"{base}{e}.{name}.{part}") for e in range(5)])

        for part in sorted({name.split(".")[-1] for name in tensors if f"{base}0.up" in name}):
            gate, up, down = (stacked(f"{x}_proj", part) for x in ("gate", "up", "down"))
            ending = between + part.removeprefix("weight")
            if part == "weight_shape":
                tensors[f"{base}gate_up_proj{ending}"] = np.array([5, 64, 64])
                tensors[f"{base}down_proj{ending}"] = np.array([5, 64, 32])
            elif part == "weight_global_scale":  # one for both halves: the scales of up are gate's
                tensors[f"{base}gate_up_proj{ending}"] = gate
                tensors[f"{base}down_proj{ending}"] = down[:, 0]
                path = "layers.experts.up_proj.weight"
                place = EXPERTS.sparse_layers.index(layer)
                wide = expected[path][place].astype(np.float64) * up[..., None] / gate[..., None]
                expected[path][place] = wide.astype(np.float32)
            else:
                tensors[f"{base}gate_up_proj{ending}"] = np.concatenate([gate, up], axis=1)
                tensors[f"{base}down_proj{ending}"] = down
    fused = write(tmp_path / "fused", EXPERTS, tensors, FORMS[form])
    _, arrays = load_policy_arrays(fused)
    for path, values in expected.items():
        np.testing.assert_allclose(arrays[path], values, rtol=3e-7 * (form == "nvfp4"))


@pytest.mark.parametrize(
    "form",
    [
        "mxfp8_floor",
        "mxfp6",
        "mxfp4",
        "nvfp4",
        "nvfp4@modelopt",
        "nvfp4_four_over_six",
        "nvfp4-16x16",
        "int4",
        "int4-4x16",
        "e4m3-128x128-power_of_two",
    ],
)
def test_an_export_is_read_back_as_what_the_rollout_serves(form, tmp_path):
    """Of float32 masters, and of bfloat16 ones with experts; the rest is 16 bits."""
    dtype = jnp.dtype("bfloat16" if form in ("nvfp4", "int4") else "float32")
    config, kinds = (
        # down_proj, which groups do not divide, is not quantized
        (dataclasses.replace(LLAMA, num_layers=1, intermediate_size=90), ("*.k_proj", "*.up_proj"))
        if dtype == jnp.float32
        else (EXPERTS, ("*.k_proj", "*.experts.up_proj"))
    )
    tensors = random_tensors(config, np.float32)
    tensors[f"{K}.weight"][:8] = 0
    source = write_model(tmp_path / "in", config, tensors)
    made, base = export_form(form), RECIPES["w4a16"]
    rollout = dataclasses.replace(base.rollout, weight=made.format)
    recipe = dataclasses.replace(base, rollout=rollout, quantized=kinds)
    synced = jax.jit(rollout_policy, static_argnums=(1, 2, 3))
    served, _ = synced(load_policy(source, dtype), recipe, dtype, False)
    _, arrays = load_policy_arrays(source)
    arrays = {path: array.astype(dtype) for path, array in arrays.items()}
    made = dataclasses.replace(made, linears=rollout_form(recipe, config, dtype.name).linears)
    _, read = load_policy_arrays(export_policy(tmp_path / "out", config, arrays, made))
    linears, seen = served.stack.tensors(), 0
    for path, values in read.items():
        weight = linears.get(path.removeprefix("layers.").removesuffix(".weight"))
        if weight is None or not hasattr(weight.value, "quantized"):
            assert np.array_equal(values, arrays[path].astype(BF16)), path
        else:
            assert np.array_equal(values, np.asarray(weight.value.quantized.dequantize())), path
            seen += 1
    assert seen == 2


def test_config_json_says_what_is_quantized(tmp_path):
    source = write_model(tmp_path / "in", EXPERTS, random_tensors(EXPERTS))
    config, arrays = load_policy_arrays(source)
    recipe = dataclasses.replace(RECIPES["nvfp4-rollout"], last_layers_in_compute=3)
    form = rollout_form(recipe, config, "bfloat16")
    out = export_policy(tmp_path / "out", config, arrays, form)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{i}.mlp.gate" for i in (0, 2, 3)]
    ignored = {"lm_head", *routers}
    ignored |= {
        f"model.layers.{i}.{name}"
        for i in (1, 2, 3)
        for name in [f"self_attn.{x}_proj" for x in "qkvo"]
        + [f"mlp.{x}_proj" for x in ("gate", "up", "down") if i == 1]
        + [f"mlp.experts.{e}.{x}_proj" for x in ("gate", "up", "down") for e in range(5) if i != 1]
    }
    assert set(said["ignore"]) == ignored and len(said["ignore"]) == len(ignored)
    remarks = form.remarks(config)
    for words in ("for weights alone", "one for gate and up", "leaves out the outer scales of"):
        assert sum(words in line for line in remarks) == 1
    assert export_form("int4").remarks(config) == [] == export_form("mxfp8").remarks(LLAMA)
    theirs = CHECKPOINTS["compressed-tensors"]["NVFP4A16"]["config"]["quantization_config"]
    group = said["config_groups"]["group_0"]
    assert group["weights"] == theirs["config_groups"]["group_0"]["weights"]
    assert group["input_activations"] is None and said["format"] == "nvfp4-pack-quantized"
    tensors = read_checkpoint(out).tensors
    assert tensors["model.layers.1.self_attn.q_proj.weight"].dtype == BF16
    assert tensors["model.layers.0.self_attn.q_proj.weight_packed"].dtype == np.uint8
    # another export over it leaves nothing that says how the first was stored
    (out / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    export_policy(out, config, arrays)
    assert read_quantization(out) is None and not (out / "hf_quant_config.json").exists()
    assert load_policy_arrays(out)[1].keys() == arrays.keys()


def test_exports_have_the_parts_of_the_other_libraries(tmp_path):
    """Names, dtypes, shapes and configuration, beside what they wrote of the same weight."""
    weight = CHECKPOINTS["weight"]
    for form, library, preset in (
        ("mxfp8", "compressed-tensors", "MXFP8"),
        ("mxfp6", "compressed-tensors", "MXFP6A16"),
        ("mxfp4", "compressed-tensors", "MXFP4"),
        ("nvfp4", "compressed-tensors", "NVFP4"),
        ("int4", "compressed-tensors", "W4A16"),
        ("nvfp4@modelopt", "modelopt", "NVFP4_DEFAULT_CFG"),
        ("mxfp8@modelopt", "modelopt", "MXFP8_DEFAULT_CFG"),
    ):
        theirs, _, _ = oracle(library, preset)
        ours = quantized_tensors("weight", weight, export_form(form))
        wanted = {n: (x.dtype, x.shape) for n, x in theirs.items() if not n.startswith("input")}
        assert {name: (x.dtype, x.shape) for name, x in ours.items()} == wanted, form


@pytest.mark.parametrize(
    ("form", "library", "preset", "largest"),
    [
        ("nvfp4", "compressed-tensors", "NVFP4", 3.0),
        ("nvfp4@modelopt", "modelopt", "NVFP4_DEFAULT_CFG", 3.703125),
    ],
)
def test_with_the_sizes_of_inputs_activations_are_nvfp4_too(
    form, library, preset, largest, tmp_path, caplog
):
    """The scale of a linear's inputs has the bits of theirs, config.json says what theirs does, and
    the weights are those without it."""
    parts, theirs, _ = oracle(library, preset)
    config, arrays = (
        LLAMA,
        load_policy_arrays(write_model(tmp_path, LLAMA, random_tensors(LLAMA)))[1],
    )
    inputs = dict.fromkeys(linear_names(config), largest) | {"layers.1.o_proj": 0.0}
    alone = export_policy(tmp_path / "alone", config, arrays, form)
    made = dataclasses.replace(export_form(form), inputs=inputs)
    both = export_policy(tmp_path / "both", config, arrays, made)
    written, before = read_checkpoint(both).tensors, read_checkpoint(alone).tensors
    (part,) = (name for name in parts if name.startswith("input"))
    assert written.keys() - before.keys() == {
        f"{name.removesuffix('weight_scale')}{part}"
        for name in before
        if "weight_scale" == name[-12:]
    }
    scale = written[f"{K}.{part}"]
    assert (scale.dtype, scale.shape) == (parts[part].dtype, parts[part].shape)
    assert scale.tobytes() == parts[part].tobytes()
    assert written[f"model.layers.1.self_attn.o_proj.{part}"] == 1  # of zeros alone
    said = json.loads((both / "config.json").read_text())["quantization_config"]
    theirs = theirs["quantization_config"]
    if library == "modelopt":
        assert said["quant_algo"] == theirs["quant_algo"] == "NVFP4"
    else:
        said, theirs = (x["config_groups"]["group_0"] for x in (said, theirs))
        assert said["input_activations"] == theirs["input_activations"]
    for path, values in load_policy_arrays(both)[1].items():
        assert np.array_equal(values, load_policy_arrays(alone)[1][path]), path
    assert "have an outer scale a row" in caplog.text
    (line,) = made.remarks(MOE)[:1]
    assert "one outer scale for each linear's inputs" in line


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("e3m2", "'e3m2' cannot be exported, no layout is known for it; choose one of bfloat16"),
        ("mxfp6_e3m2", "int4 (groups of 32 along a row, of NVFP4 16, of INT4 any)"),
        ("mxfp8_e5m2", "'mxfp8_e5m2' cannot be exported"),
        ("nvfp4_rows", "'nvfp4_rows' cannot be exported"),
        ("nvfp4-1x32", "'nvfp4-1x32' cannot be exported"),
        ("int4-1xall", "'int4-1xall' cannot be exported"),
        ("mxfp8-1x16", "'mxfp8-1x16' cannot be exported"),
        ("e4m3-1x128", "'e4m3-1x128' cannot be exported"),
        ("int4@modelopt", "mxfp8@modelopt, nvfp4@modelopt"),
        ("nvfp4@tensorrt", "'nvfp4@tensorrt' cannot be exported"),
        ("compute", "'compute' cannot be exported"),
        ("int4-1x128", "int4-1x128 cannot be exported: compressed-tensors stores rows that groups"),
        ("nvfp4-1x16", "down_proj [64, 90]"),
    ],
)
def test_what_no_library_stores_is_refused(form, message, tmp_path):
    config = dataclasses.replace(LLAMA, intermediate_size=90)
    with pytest.raises(UserError) as error:
        export_policy(tmp_path, config, None, form)
    assert message in str(error.value) and "\n" not in str(error.value)


def of_zeros(form):
    """The parts of a [32, 64] linear."""
    return dict(quantized_tensors("weight", np.ones((32, 64), np.float32), export_form(form)))


BAD = [
    ("nvfp4", lambda p: p.pop("weight_scale"), "is nvfp4, but {k}_scale is missing; get the whole"),
    ("nvfp4", lambda p: p.pop("weight_global_scale"), "but {k}_global_scale is missing"),
    ("nvfp4", lambda p: p.pop("weight_packed"), "tensor {k}_global_scale belongs to no linear"),
    ("mxfp4", lambda p: p.pop("weight_scale"), "is mxfp4, but {k}_scale is missing"),
    ("int4", lambda p: p.pop("weight_scale"), "is int4, but {k}_scale is missing"),
    (
        "nvfp4",
        lambda p: p.update(weight_scale=p["weight_scale"][:, :3]),
        "{k}_scale has shape [32, 3]; a weight [32, 64] in nvfp4, a scale for 1 x 16, needs [32, 4]",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_scale=np.full((32, 4), np.nan, E4M3)),
        "{k}_scale holds 128 non-finite scales of 128; the nvfp4 checkpoint is damaged",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_scale=np.ones((32, 4), np.float32)),
        "{k}_scale has dtype float32; of nvfp4 it is float8_e4m3fn",
    ),
    (
        "mxfp4",
        lambda p: p.update(weight_scale=np.full((32, 2), 255, np.uint8)),
        "{k}_scale holds 64 non-finite scales of 64",
    ),
    (
        "int4",
        lambda p: p.update(weight_scale=np.full((32, 2), np.inf, BF16)),
        "{k}_scale holds 64 non-finite scales of 64",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_global_scale=np.zeros(1, np.float32)),
        "{k}_global_scale must be positive and finite, and holds [0.0]",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_global_scale=np.full(1, np.nan, np.float32)),
        "{k}_global_scale must be positive and finite",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_global_scale=np.ones(32, np.float32)),
        "{k}_global_scale has shape [32]",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_packed=p["weight_packed"].view(np.int8)),
        "{k}_packed has dtype int8; of nvfp4 it is uint8",
    ),
    (
        "nvfp4",
        lambda p: p.update(weight_packed=p["weight_packed"][:, :31]),
        "{k}_packed has shape [32, 31]; a weight [32, 64] in nvfp4",
    ),
    (
        "int4",
        lambda p: p.update(weight_packed=p["weight_packed"].view(np.uint8)),
        "{k}_packed has dtype uint8; of int4 it is int32",
    ),
    (
        "int4",
        lambda p: p.update(weight_packed=p["weight_packed"].T.copy()),
        "{k}_packed has shape [8, 32]; a weight [32, 64] in int4, a scale for 1 x 32, needs [32, 8]",
    ),
    (
        "int4",
        lambda p: p.update(weight_shape=np.array([32, 63])),
        "{k}_shape says [32, 63], and config.json implies [32, 64]",
    ),
    (
        "int4",
        lambda p: p.update(weight_shape=np.array([[32.0, 64.0]])),
        "{k}_shape says [[32.0, 64.0]]",
    ),
    (
        "int4",
        lambda p: p.update(weight_zero_point=np.zeros((4, 2), np.int32)),
        "{k}_zero_point: int4 with a zero point beside each scale (asymmetric) is not read",
    ),
    (
        "int4",
        lambda p: p.update(weight_g_idx=np.zeros(64, np.int32)),
        "{k}_g_idx: int4 with columns permuted by activations (actorder) is not read",
    ),
    (
        "int4",
        lambda p: p.update(weight=np.zeros((32, 64), BF16)),
        "{k}_packed is int4, and {k} is there, too",
    ),
    (
        "nvfp4@modelopt",
        lambda p: p.pop("weight_scale_2"),
        "is nvfp4, but {k}_scale_2 is missing",
    ),
    (
        "nvfp4@modelopt",
        lambda p: p.update(weight_scale_2=np.array(-1, np.float32)),
        "{k}_scale_2 must be positive and finite, and holds [-1.0]",
    ),
    (
        "mxfp8",
        lambda p: p.update(weight_scale=np.full((32, 2), 255, np.uint8)),
        "{k}_scale holds 64 non-finite scales of 64",
    ),
]


@pytest.mark.parametrize(("form", "edit", "message"), BAD)
def test_damaged_linears_are_refused_by_tensor(form, edit, message, tmp_path):
    parts = of_zeros(form)
    quantization = FORMS.get(form)
    if form == "nvfp4@modelopt":
        quantization = CHECKPOINTS["modelopt"]["NVFP4_DEFAULT_CFG"]["config"]
    elif form == "mxfp8":
        quantization = CHECKPOINTS["compressed-tensors"]["MXFP8"]["config"]
    whole = write(tmp_path / "whole", LLAMA, with_linear(LLAMA, parts), quantization)
    load_policy_arrays(whole)
    edit(parts)
    damaged = write(tmp_path / "damaged", LLAMA, with_linear(LLAMA, parts), quantization)
    with pytest.raises(UserError) as error:
        load_policy_arrays(damaged)
    text = str(error.value)
    assert text.startswith(f"{damaged}/model.safetensors: tensor {K}") and "\n" not in text
    assert message.format(k=f"{K}.weight") in text


def changed(form, **changes):
    """FORMS with keys of its one group's weights changed."""
    quantization = json.loads(json.dumps(FORMS[form]))
    quantization["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    return quantization["quantization_config"]


def of_modelopt(**changes):
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16} | changes


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (changed("int4") | {"format": "marlin-24"}, ".format 'marlin-24' is not read"),
        (changed("int4", symmetric=False), ".weights.symmetric false is not read"),
        (changed("int4", num_bits=8), ".weights.type 'int' in 8 bits is not read"),
        (changed("int4", actorder="group"), ".weights.actorder 'group' is not read"),
        (changed("int4", actorder="dynamic"), ".weights.actorder 'dynamic' is not read"),
        (changed("int4", strategy="block"), ".weights.strategy 'block' is not read"),
        (changed("int4", group_size=0), ".weights.group_size must be positive, got 0"),
        (changed("nvfp4", group_size=32), ".weights.group_size 32 is not read"),
        (changed("mxfp4", strategy="channel"), ".weights.strategy 'channel' is not read"),
        (
            changed("nvfp4") | {"version": "0.21.0"},
            ".version 0.21.0 of compressed-tensors is newer",
        ),
        (changed("int4") | {"version": "1.0"}, "write 0.20.0 here once it is sure that the layout"),
        (changed("int4") | {"version": 20}, ".version must be a version such as 0.20.0, got 20"),
        (of_modelopt(quant_algo="MIXED_PRECISION"), ".quant_algo 'MIXED_PRECISION' is not read"),
        (of_modelopt(quant_algo="NVFP5"), ".quant_algo 'NVFP5' is not read"),
        (of_modelopt(group_size=32), ".group_size 32 is not read"),
        (
            of_modelopt(producer={"name": "modelopt", "version": "0.48.0rc1"}),
            ".producer.version 0.48.0rc1 of modelopt is newer than 0.47.0",
        ),
    ],
)
def test_other_forms_are_refused_by_key(quantization, message, tmp_path):
    directory = write(tmp_path, LLAMA, {}, {"quantization_config": quantization})
    with pytest.raises(UserError) as error:
        load_policy_arrays(directory)
    text = str(error.value)
    assert text.startswith(f"{directory}/config.json: quantization_config") and message in text
    assert "\n" not in text


def test_columns_that_groups_do_not_divide_are_refused(tmp_path):
    quantization = {"quantization_config": changed("int4", group_size=24)}
    write(tmp_path, LLAMA, with_linear(LLAMA, of_zeros("int4")), quantization)
    with pytest.raises(
        UserError, match="weight_packed is int4 of 64 columns, which groups of 24 do"
    ):
        load_policy_arrays(tmp_path)


@pytest.mark.parametrize("known", [{"actorder": "weight"}, {"actorder": "static"}, {}])
def test_columns_in_the_weights_own_order_are_read(known, tmp_path):
    quantization = {"quantization_config": changed("int4", **known) | {"version": "0.9.1"}}
    write(tmp_path, LLAMA, with_linear(LLAMA, of_zeros("int4")), quantization)
    value = load_policy_arrays(tmp_path)[1]["layers.k_proj.weight"][0]
    assert np.array_equal(value, np.full((32, 64), np.float32(0.142578125 * 7)))


def requantized(form, expected):
    return quantized_tensors("weight", expected, export_form(form))


def test_mxfp8_is_served_with_the_values_of_the_file(tmp_path):
    """By whatever rule the scales were chosen; codes and scales may be others, as 224 x 2 and 448."""
    for library, preset in (("compressed-tensors", "MXFP8"), ("modelopt", "MXFP8_DEFAULT_CFG")):
        parts, config, _ = oracle(library, preset)
        write(tmp_path / library, LLAMA, with_linear(LLAMA, parts), config)
        value = load_policy_arrays(tmp_path / library)[1]["layers.k_proj.weight"][0]
        for dtype in (np.float32, BF16):
            again = requantized("mxfp8", value.astype(dtype))
            scale = again["weight_scale"].view(E8M0).astype(np.float32).repeat(32, axis=1)
            assert np.array_equal(again["weight"].astype(np.float32) * scale, value)


@pytest.mark.parametrize("case", ["slime", "compressed-tensors"])
def test_int4_is_served_with_the_codes_of_the_file_where_each_group_reaches_7(case, tmp_path):
    """Scales of amax / 7 are found again in float32, but of a group of zeros. One of another rule
    is not: where a group's largest code is -8, or less than 7, it is served in other steps."""
    found = INT4[case]["bfloat16 32"]
    config = dataclasses.replace(
        LLAMA, hidden_size=256, num_heads=1, num_kv_heads=1, head_dim=8, num_layers=1
    )
    parts = {name: x for name, x in found.items() if name.startswith("weight")}
    write(tmp_path, config, with_linear(config, parts), FORMS["int4"])
    value = load_policy_arrays(tmp_path)[1]["layers.k_proj.weight"][0]
    again = requantized("int4", value)
    codes = found["codes"].reshape(8, 8, 32)
    kept = np.abs(codes).max(-1) == 7
    assert kept.any() and (case != "slime" or kept[codes.any(-1)].all())
    same = (again["weight_packed"] == found["weight_packed"]).reshape(8, 8, 4).all(-1)
    same &= again["weight_scale"] == found["weight_scale"]
    assert same[kept].all() and not same[codes.min(-1) == -8].any()

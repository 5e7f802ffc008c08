"""Which recipes are refused, what run options change, and which linears a recipe quantizes."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from fp8rl_jax.config.correction import CorrectionConfig
from fp8rl_jax.config.recipe import (
    COMPUTE,
    RECIPES,
    ForwardFormats,
    PrecisionConfig,
    Recipe,
    SideScales,
    TensorFormat,
    get_recipe,
)
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import linear_names
from fp8rl_jax.precision import check_recipe, element_dtype, formats, max_value, quantized_layers, unlike_sides

W, A, KV = TensorFormat("e4m3", (128, 128)), TensorFormat("e4m3", (1, 128)), TensorFormat("e4m3")
FULL = RECIPES["fp8-rl"]
CONFIG = PolicyConfig("llama", 131, 192, 320, 3, 4, 2, 48)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_named_recipe_is_accepted(name):
    check_recipe(RECIPES[name])


@pytest.mark.parametrize("formats", [ForwardFormats(weight=W), ForwardFormats(W, A, key=KV, value=KV)])
def test_parts_of_the_full_recipe_are_accepted(formats):
    """Weight-only quantization, and an FP8 cache read by queries in the compute dtype."""
    check_recipe(Recipe("parts", rollout=formats))


def rollout(**changes):
    return {"rollout": replace(FULL.rollout, **changes)}


def trained(**changes):
    """Changes that turn the full recipe into one whose trainer is in FP8, itself changed."""
    jet = RECIPES["jet-rl"]
    sides = {name: getattr(jet, name) for name in ("trainer", "output_gradient", "saved_activation")}
    return sides | changes


REFUSED = {
    "e2m1": (rollout(weight=TensorFormat("e2m1", (128, 128))), r"rollout\.weight\.format 'e2m1'"),
    "stochastic": (rollout(weight=replace(W, rounding="stochastic")), r"rollout\.weight asks for a rounding"),
    "hadamard": (rollout(activation=replace(A, transform="hadamard")), r"rollout\.activation asks for a rounding or transform"),
    "hadamard compute": ({"trainer": ForwardFormats(weight=replace(COMPUTE, transform="hadamard"))}, r"trainer\.weight asks"),
    "activation only": (rollout(weight=COMPUTE), r"rollout\.activation is quantized but the weight is not"),
    "weight block": (rollout(weight=KV), r"rollout\.weight\.block must be given"),
    "activation block": (rollout(activation=TensorFormat("e4m3", (1, 64))), r"rollout\.activation\.block must be \(1, 128\)"),
    "activation per tensor": (rollout(activation=KV), r"rollout\.activation\.block must be"),
    "key only": (rollout(value=COMPUTE), r"rollout\.value and key must"),
    "value only": (rollout(key=COMPUTE), r"rollout\.value and key must"),
    "two cache formats": (rollout(value=TensorFormat("e5m2")), r"rollout\.value and key must"),
    "query only": (rollout(key=COMPUTE, value=COMPUTE), r"rollout\.query is quantized but the cache is not"),
    "probability": (rollout(probability=KV), r"rollout\.probability cannot be quantized"),
    "cache block": (rollout(key=A), r"rollout\.key must have one float32 scale"),
    "cache scale": (rollout(query=replace(KV, scale="power_of_two")), r"rollout\.query must have one float32 scale"),
    "trainer weight only": ({"trainer": ForwardFormats(weight=W)}, r"trainer\.activation must be quantized where"),
    "trainer cache": ({"trainer": ForwardFormats(key=KV, value=KV)}, r"trainer\.key is quantized"),
    "output_gradient": ({"output_gradient": A}, r"output_gradient is quantized, but the trainer's linears are not"),
    "saved_activation": ({"saved_activation": A}, r"saved_activation is quantized, but the trainer's linears are not"),
    "another saved format": (trained(saved_activation=replace(A, format="e5m2")), r"saved_activation must be the format of"),
    "gradient e2m1": (trained(output_gradient=replace(A, format="e2m1")), r"output_gradient\.format 'e2m1'"),
    "gradient rounding": (trained(output_gradient=replace(A, rounding="stochastic")), r"output_gradient asks for a rounding"),
    "gradient block": (trained(output_gradient=replace(A, block=(1, 64))), r"output_gradient\.block must be \(1, 128\)"),
    "oblong weight block": (
        trained(trainer=replace(RECIPES["jet-rl"].trainer, weight=TensorFormat("e4m3", (64, 128)))),
        r"output_gradient\.block must be \(1, 64\) and trainer\.weight\.block square",
    ),
    "kv constants": ({"kv_constants": (200.0, 0.0, 100.0)}, r"kv_constants must be three positive numbers"),
    "two kv constants": ({"kv_constants": (200.0, 100.0)}, r"kv_constants must be three positive numbers"),
    "kv percentile": ({"kv_percentile": 999.0}, r"kv_percentile must be from 0 to 100, and is 999"),
    "optimizer_moment": ({"optimizer_moment": W}, r"optimizer_moment must be e4m3 with one scale for a group"),
    "exact": ({"exact": True}, r"exact cannot be promised: the rollout's weight has format 'e4m3' and the trainer's 'compute'"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_computed_is_refused_by_field(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        check_recipe(replace(FULL, **changes))


def test_a_pair_that_a_backend_cannot_multiply_is_refused_with_role_formats_and_backend(monkeypatch):
    """The reference takes e2m1, once it can be stored; Hopper's tensor cores do not."""
    monkeypatch.setitem(formats.ELEMENT_DTYPES, "e2m1", jnp.float4_e2m1fn)
    jet, four = RECIPES["jet-rl"], ForwardFormats(replace(W, format="e2m1"), A)
    for recipe in (replace(FULL, rollout=four), replace(jet, output_gradient=replace(A, format="e2m1"))):
        check_recipe(recipe)
    monkeypatch.setattr(formats, "selected_backend", lambda backend: "hopper" if backend == "hopper" else "reference")
    with pytest.raises(UserError, match=r"rollout\.activation e4m3 is multiplied by rollout\.weight e2m1: the hopper backend"):
        check_recipe(replace(FULL, rollout=four), "hopper")
    with pytest.raises(UserError, match=r"output_gradient e2m1 is multiplied by trainer\.weight.* float4_e2m1fn by float8"):
        check_recipe(replace(jet, output_gradient=replace(A, format="e2m1")), "hopper")
    check_recipe(replace(FULL, rollout=ForwardFormats(weight=four.weight)), "hopper")  # a weight alone is unpacked
    five = replace(A, format="e5m2")
    trainer = ForwardFormats(replace(W, format="e5m2"), five)
    check_recipe(replace(jet, trainer=trainer, saved_activation=five, output_gradient=five), "hopper")


def test_a_backend_that_is_not_there_is_refused_where_the_recipe_needs_it():
    with pytest.raises(UserError, match=r"precision\.backend: blockwise_matmul: the hopper backend needs a GPU"):
        check_recipe(FULL, "hopper")
    check_recipe(RECIPES["bf16"], "hopper")
    with pytest.raises(UserError, match=r"precision\.backend: blockwise_matmul: the hopper backend needs a GPU"):
        check_recipe(replace(RECIPES["bf16"], exact=True), "hopper")


def test_a_backend_without_exact_products_is_refused(monkeypatch):
    monkeypatch.setattr(formats, "selected_backend", lambda backend: backend)
    with pytest.raises(UserError, match=r"precision\.exact: the hopper backend has no exact products; choose reference"):
        check_recipe(replace(RECIPES["jet-rl"], exact=True), "hopper")


def test_formats():
    assert max_value(KV) == 448 and max_value(TensorFormat("e5m2")) == 57344
    for name in ("compute", "e2m1"):
        with pytest.raises(UserError, match=f"{name!r} cannot be stored"):
            element_dtype(TensorFormat(name))


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(UserError, match=r"'fp8-r1'; did you mean 'fp8-rl'\? \(known: bf16, fp8-rollout, .*\)"):
        get_recipe("fp8-r1")
    with pytest.raises(UserError, match=r"'zzz' \(known"):
        get_recipe("zzz")


def test_no_change_gives_the_named_recipe():
    for name, recipe in RECIPES.items():
        assert get_recipe(name) == get_recipe(name, PrecisionConfig()) == recipe


def test_scale_changes_the_block_quantized_roles_only():
    changed = get_recipe("fp8-rl", PrecisionConfig(scale="power_of_two")).rollout
    assert changed.weight == replace(W, scale="power_of_two") and changed.activation == replace(A, scale="power_of_two")
    assert (changed.query, changed.key, changed.value) == (KV, KV, KV)
    assert get_recipe("bf16", PrecisionConfig(scale="power_of_two")) == RECIPES["bf16"]


def test_scales_of_one_side():
    jet = RECIPES["jet-rl"]
    served = get_recipe("jet-rl", PrecisionConfig(rollout=SideScales("power_of_two")))
    assert served == replace(jet, rollout=RECIPES["infir2"].rollout)
    trained = get_recipe("jet-rl", PrecisionConfig(scale="power_of_two", trainer=SideScales("float32", 64)))
    blocks = ForwardFormats(replace(W, block=(64, 64)), replace(A, block=(1, 64)))
    assert (trained.rollout, trained.trainer) == (RECIPES["infir2"].rollout, blocks)
    assert trained.output_gradient == trained.saved_activation == blocks.activation
    for recipe in (served, trained):
        check_recipe(recipe)
        with pytest.raises(UserError, match="exact cannot be promised: the rollout's weight has "):
            check_recipe(replace(recipe, exact=True))
    both = "power_of_two scales in the rollout, e4m3"
    assert unlike_sides(served) == (
        f"weight: e4m3 128x128 {both} 128x128 float32 scales in the trainer; "
        f"activation: e4m3 1x128 {both} 1x128 float32 scales in the trainer"
    )
    assert [name for name, recipe in RECIPES.items() if unlike_sides(recipe)] == []
    for name, side in (("fp8-rl", "trainer"), ("fp8-kv", "rollout"), ("bf16", "trainer")):
        with pytest.raises(UserError, match=rf"precision\.{side}\.scale: recipe '{name}' quantizes no linear in the {side}"):
            get_recipe(name, PrecisionConfig(**{side: SideScales("power_of_two")}))
    with pytest.raises(UserError, match=r"precision\.trainer\.block: 0 must be a number of at least 2"):
        get_recipe("jet-rl", PrecisionConfig(trainer=SideScales(block=0)))


def test_a_block_without_kernels_is_refused_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(formats, "selected_backend", lambda backend: "hopper")
    recipe = get_recipe("jet-rl", PrecisionConfig(rollout=SideScales(block=32)))
    check_recipe(recipe, "auto")
    with pytest.raises(UserError, match=r"rollout\.weight\.block is 32x32, and the hopper backend has 128x128"):
        check_recipe(recipe, "hopper")


def test_power_of_two_scales_of_the_trainer_are_infir2():
    changed = get_recipe("jet-rl", PrecisionConfig(scale="power_of_two"))
    assert replace(changed, name="infir2") == RECIPES["infir2"]
    blocks = [f for f in (*vars(changed.trainer).values(), changed.output_gradient, changed.saved_activation) if f.quantized]
    assert len(blocks) == 4 and all(f.scale == "power_of_two" for f in blocks)


def test_end_to_end_and_jet_rl_are_one_flow_and_differ_by_correction():
    jet, end = RECIPES["jet-rl"], RECIPES["fp8-e2e"]
    assert replace(end, name="jet-rl", correction="none") == jet and end.correction == "nemo_is"
    cached = RECIPES["fp8-e2e-kv"]
    assert replace(cached, name="fp8-e2e", rollout=end.rollout) == end and cached.rollout.key == KV


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipes_correction_is_the_preset_of_that_name(name):
    """What rl.correction.method = "recipe" becomes; an end-to-end recipe's weights are not truncated."""
    filled = CorrectionConfig().resolve(RECIPES[name].correction)
    assert filled == CorrectionConfig(method=RECIPES[name].correction).filled()
    if name.startswith("fp8-e2e"):
        assert (filled.weights, filled.bounds, filled.overflow) == ("token", "keep", "zero")


def test_output_gradient_format():
    assert get_recipe("jet-rl", PrecisionConfig(output_gradient="e5m2")).output_gradient == replace(A, format="e5m2")
    assert get_recipe("jet-rl", PrecisionConfig(output_gradient="compute")).output_gradient == COMPUTE
    with pytest.raises(UserError, match="precision.output_gradient: the linears of recipe 'fp8-rl' are not trained in FP8"):
        get_recipe("fp8-rl", PrecisionConfig(output_gradient="e5m2"))


def test_calibration_and_exclusion_change_the_recipe():
    changed = get_recipe("fp8-rl", PrecisionConfig(excluded=("layers.0.*",), kv_calibration="rollout"))
    assert changed.excluded == ("layers.0.*",) and changed.kv_calibration == "rollout"
    for change in ({"kv_calibration": "rollout"}, {"kv_rule": "verl"}):
        with pytest.raises(UserError, match=f"precision.{next(iter(change))}: recipe 'jet-rl' has no FP8 cache"):
            get_recipe("jet-rl", PrecisionConfig(**change))
    with pytest.raises(UserError, match="precision.excluded: recipe 'fp8-kv' quantizes no linear"):
        get_recipe("fp8-kv", PrecisionConfig(excluded=("layers.0.*",)))


def test_all_linears_in_model_order():
    names = linear_names(CONFIG)
    assert len(names) == 21 and names[0] == "layers.0.q_proj"
    assert quantized_layers(FULL, names) == names
    assert quantized_layers(RECIPES["bf16"], names) == quantized_layers(RECIPES["fp8-kv"], names) == ()


def test_exclusion():
    names = linear_names(CONFIG)
    chosen = quantized_layers(replace(FULL, excluded=("layers.1.*", "*.o_proj")), names)
    assert chosen == tuple(n for n in names if not n.startswith("layers.1.") and not n.endswith("o_proj"))
    two = replace(FULL, quantized=("layers.2.[gu]*_proj",))
    assert quantized_layers(two, names) == ("layers.2.gate_proj", "layers.2.up_proj")


def test_first_and_last_layers_in_the_compute_dtype():
    names = linear_names(CONFIG)
    changed = get_recipe("fp8-e2e", PrecisionConfig(first_layers_in_compute=1, last_layers_in_compute=1))
    assert quantized_layers(changed, names) == tuple(n for n in names if n.startswith("layers.1."))
    assert quantized_layers(replace(changed, first_layers_in_compute=0), names) == names[:14]
    with pytest.raises(UserError, match="first_layers_in_compute = 1 and last_layers_in_compute = 2 leave none of 3 layers"):
        quantized_layers(replace(changed, last_layers_in_compute=2), names)
    with pytest.raises(UserError, match=r"precision\.last_layers_in_compute: recipe 'bf16' quantizes no linear"):
        get_recipe("bf16", PrecisionConfig(last_layers_in_compute=1))
    with pytest.raises(UserError, match=r"precision\.first_layers_in_compute: -1 must be a number of at least 0"):
        get_recipe("fp8-rl", PrecisionConfig(first_layers_in_compute=-1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"excluded": ("layers.7.*",)}, r"excluded pattern 'layers\.7\.\*' matches no linear.*layers\.0\.q_proj"),
        ({"quantized": ("*.q_proj", "*.qkv_proj")}, r"quantized pattern '\*\.qkv_proj' matches no linear"),
        ({"excluded": ("q_proj",)}, "excluded pattern 'q_proj' matches no linear"),  # whole names, never substrings
        ({"excluded": ("*.Q_PROJ",)}, "matches no linear"),
        ({"excluded": ("*",)}, "every linear is excluded"),
    ],
)
def test_patterns_that_do_nothing_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        quantized_layers(replace(FULL, **changes), linear_names(CONFIG))

"""Which recipes are refused, what run options change, and which linears a recipe quantizes."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
import tomli_w

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.correction import CorrectionConfig
from fp8rl_jax.config.files import dump_toml, read_config
from fp8rl_jax.config.formats import (
    ELEMENTS,
    ElementType,
    ScaleRule,
    parse_format,
    register_element,
)
from fp8rl_jax.config.recipe import (
    COMPUTE,
    RECIPES,
    ForwardFormats,
    LayerFormats,
    PrecisionConfig,
    Recipe,
    SideScales,
    TensorFormat,
    TrainerFormats,
    get_recipe,
    read_rows,
)
from fp8rl_jax.config.recipe import recipe as recipe_like
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import linear_names
from fp8rl_jax.precision import (
    check,
    check_recipe,
    element_dtype,
    max_value,
    quantized_layers,
    unlike_sides,
    why_in_compute,
)
from pallas_kernels.backend import tracing_for
from pallas_kernels.quantize.api import Rule

W, A, KV = TensorFormat("e4m3", (128, 128)), TensorFormat("e4m3", (1, 128)), TensorFormat("e4m3")
FULL = RECIPES["fp8-rl"]
CONFIG = PolicyConfig("llama", 131, 192, 320, 3, 4, 2, 48)


def test_the_kernels_know_every_scale_rule_of_a_recipe():
    assert get_args(ScaleRule) == get_args(Rule)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_named_recipe_is_accepted(name):
    check_recipe(RECIPES[name])


GROUPS, WIDE = TensorFormat("e4m3", (1, 32), "power_of_two"), TensorFormat("e5m2")


@pytest.mark.parametrize(
    "formats",
    [
        ForwardFormats(weight=W),
        ForwardFormats(W, A, key=KV, value=KV),
        ForwardFormats(GROUPS, GROUPS, KV, WIDE, WIDE),
    ],
)
def test_parts_of_the_full_recipe_are_accepted(formats):
    """Weight-only quantization; an FP8 cache read by queries in the compute dtype; groups of 32 on
    both sides of a product."""
    check_recipe(Recipe("parts", rollout=formats))


def rollout(**changes):
    return {"rollout": replace(FULL.rollout, **changes)}


def trained(**changes):
    """Changes that turn the full recipe into one whose trainer is in FP8, itself changed."""
    jet = RECIPES["jet-rl"]
    sides = {
        name: getattr(jet, name) for name in ("trainer", "output_gradient", "saved_activation")
    }
    return sides | changes


LINEARS_IN_ONE_SCALE = ForwardFormats(KV, KV)
REFUSED = {
    "activation only": (
        rollout(weight=COMPUTE),
        r"rollout\.activation is quantized but the weight is not",
    ),
    "one scale beside blocks": (rollout(weight=KV), r"rollout\.activation\.block must be 1xall"),
    "activation block": (
        rollout(activation=TensorFormat("e4m3", (1, 64))),
        r"rollout\.activation\.block must be 1x128",
    ),
    "activation per tensor": (rollout(activation=KV), r"rollout\.activation\.block must be"),
    "key only": (rollout(value=COMPUTE), r"rollout\.value and key must"),
    "value only": (rollout(key=COMPUTE), r"rollout\.value and key must"),
    "two cache formats": (rollout(value=TensorFormat("e5m2")), r"rollout\.value and key must"),
    "query only": (
        rollout(key=COMPUTE, value=COMPUTE),
        r"rollout\.query is quantized but the cache is not",
    ),
    "cache block": (rollout(key=A), r"rollout\.key must have one float32 scale"),
    "cache scale": (
        rollout(query=replace(KV, scale="power_of_two")),
        r"rollout\.query must have one float32 scale",
    ),
    "trainer weight only": (
        trained(trainer=TrainerFormats(weight=W)),
        r"output_gradient is quantized, but trainer\.activation is not",
    ),
    "trainer cache": (
        {"trainer": ForwardFormats(key=KV, value=KV)},
        r"trainer\.key cannot be quantized",
    ),
    "output_gradient": (
        {"output_gradient": A},
        r"output_gradient is quantized, but the trainer's linears are not",
    ),
    "saved_activation": (
        {"saved_activation": A},
        r"saved_activation is quantized, but the trainer's linears are not",
    ),
    "another saved format": (
        trained(saved_activation=replace(A, element="e5m2")),
        r"saved_activation must be the format of",
    ),
    "gradient block": (
        trained(output_gradient=replace(A, block=(1, 64))),
        r"output_gradient\.block must be 1x128",
    ),
    "gradient of weights": (
        trained(output_gradient=parse_format("int4")),
        r"output_gradient cannot be int4-1x32, which is of weights alone; use \"compute\"",
    ),
    "values of weights": (
        {"rollout": ForwardFormats(value=parse_format("int4-1x16"))},
        r"rollout\.value cannot be int4-1x16, which is of weights alone",
    ),
    "an estimator of other weights": (
        trained(weight_gradient_estimator="differentiable"),
        r"weight_gradient_estimator must be \"straight_through\": e4m3-128x128 is not e2m1",
    ),
    "an estimator of nothing": (
        {"weight_gradient_estimator": "differentiable"},
        "weight_gradient_estimator is of a trainer's quantized weights, and there are none",
    ),
    "weights that are clamped": (
        rollout(weight=parse_format("fp4_clamped")),
        r"rollout\.weight is of activations alone: fp4_clamped-1xall clamps outliers; use fp4",
    ),
    "outliers among all tokens": (
        rollout(weight=parse_format("fp4"), activation=parse_format("fp4_clamped_tensor")),
        r"rollout\.activation is fp4_clamped_tensor-1xall, whose bounds are quantiles of all tokens",
    ),
    "drawn roundings": (
        trained(gradient_rounding="stochastic"),
        r"gradient_rounding must be \"nearest\": e4m3-1x128 has no stochastic rounding",
    ),
    "exact beside one scale for all tokens": (
        trained(**dict.fromkeys(("rollout", "trainer"), LINEARS_IN_ONE_SCALE), exact=True)
        | {"output_gradient": COMPUTE, "saved_activation": COMPUTE},
        r"exact cannot be promised: a scale of e4m3 one scale is shared by the tokens",
    ),
    "kv constants": (
        {"kv_constants": (200.0, 0.0, 100.0)},
        r"kv_constants must be three positive numbers",
    ),
    "two kv constants": (
        {"kv_constants": (200.0, 100.0)},
        r"kv_constants must be three positive numbers",
    ),
    "kv prompts of another": (
        {"kv_prompts": 2, "kv_calibration": "update"},
        'kv_prompts is of kv_calibration = "trainer" alone; set that, too, or kv_prompts to 0',
    ),
    "kv prompts": ({"kv_prompts": -1}, "kv_prompts must be at least 0, and is -1"),
    "kv percentile": ({"kv_percentile": 999.0}, r"kv_percentile must be from 0 to 100, and is 999"),
    "exact": (
        {"exact": True},
        r"exact cannot be promised: the rollout's weight has element 'e4m3' and the trainer's 'compute'",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_computed_is_refused_by_field(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        check_recipe(replace(FULL, **changes))


def test_a_pair_that_a_backend_cannot_multiply_is_refused_with_role_formats_and_backend(
    monkeypatch,
):
    """The reference takes e3m4; Hopper's tensor cores do not."""
    jet, other = RECIPES["jet-rl"], ForwardFormats(replace(W, element="e3m4"), A)
    for recipe in (
        replace(FULL, rollout=other),
        replace(jet, output_gradient=replace(A, element="e3m4")),
    ):
        check_recipe(recipe)
    monkeypatch.setattr(
        check,
        "selected_backend",
        lambda backend: "hopper" if backend == "hopper" else "reference",
    )
    with pytest.raises(
        UserError,
        match=r"rollout\.activation e4m3 is multiplied by rollout\.weight e3m4: the hopper backend",
    ):
        check_recipe(replace(FULL, rollout=other), "hopper")
    with pytest.raises(
        UserError,
        match=r"output_gradient e3m4 is multiplied by trainer\.weight.* float8_e3m4 by float8",
    ):
        check_recipe(replace(jet, output_gradient=replace(A, element="e3m4")), "hopper")
    # a weight alone is unpacked
    check_recipe(replace(FULL, rollout=ForwardFormats(weight=other.weight)), "hopper")
    five = replace(A, element="e5m2")
    trainer = TrainerFormats(replace(W, element="e5m2"), five)
    check_recipe(
        replace(jet, trainer=trainer, saved_activation=five, output_gradient=five), "hopper"
    )


@pytest.mark.parametrize("recipe", [FULL, RECIPES["bf16"], replace(RECIPES["bf16"], exact=True)])
def test_a_backend_that_is_not_there_is_refused(recipe):
    """For bf16, too: its rollout attends with the kernels of the backend."""
    with pytest.raises(
        UserError, match=r"precision\.backend: blockwise_matmul: the hopper backend needs a GPU"
    ):
        check_recipe(recipe, "hopper")


def test_exact_mode_is_refused_on_a_tpu(monkeypatch):
    exact = replace(RECIPES["jet-rl"], exact=True)
    check_recipe(exact)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(UserError, match="exact cannot be promised: its sums are made in float64"):
        check_recipe(exact)


def test_exact_mode_takes_one_hopper_gpu(monkeypatch):
    exact = replace(RECIPES["jet-rl"], exact=True)
    with tracing_for(132):
        check_recipe(exact, "hopper")
        monkeypatch.setattr(jax, "device_count", lambda: 8)
        with pytest.raises(UserError, match=r"hopper backend run on one GPU alone, JAX sees 8"):
            check_recipe(exact, "hopper")
        check_recipe(RECIPES["jet-rl"], "hopper")


def test_element_types_are_what_their_dtypes_are():
    for element in ELEMENTS.values():
        fmt, info = TensorFormat(element.name), jnp.finfo(element.dtype)
        assert (element_dtype(fmt), max_value(fmt), element.bits) == (
            info.dtype,
            float(info.max),
            info.bits,
        )
    for ask in (element_dtype, max_value):
        with pytest.raises(UserError, match="'compute' cannot be stored"):
            ask(COMPUTE)


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("compute", COMPUTE),
        ("e4m3", KV),
        ("e4m3-128x128", W),
        ("e5m2-1x128", TensorFormat("e5m2", (1, 128))),
        ("e4m3-1x32-power_of_two", TensorFormat("e4m3", (1, 32), "power_of_two")),
    ],
)
def test_a_format_is_read_as_it_is_written(name, fmt):
    assert parse_format(name) == fmt and fmt.name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("e4m9", r"unknown element 'e4m9'; did you mean 'e4m3'\? \(known: compute, e4m3, e5m2"),
        ("e4m3-0x128", "block must be two positive sizes"),
        ("e4m3-128", "'e4m3-128' is no format"),
        ("e4m3-1x128-bf16", "unknown scale 'bf16'"),
        ("compute-1x128", "the compute dtype has neither block nor scale"),
    ],
)
def test_what_is_no_format_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        parse_format(name)


def test_a_new_file_registers_an_element(monkeypatch):
    monkeypatch.setitem(ELEMENTS, "f4", None)
    del ELEMENTS["f4"]  # not there yet, and gone again after the test
    element = register_element(ElementType("f4", "float4_e2m1fn", 6.0, 4))
    name, fmt = "f4-1x32-power_of_two", TensorFormat("f4", (1, 32), "power_of_two")
    row = recipe_like(
        "fp8-rollout", "mine", **{"rollout.weight": name, "rollout.activation": "e4m3-1x32"}
    )
    assert (
        row.rollout.weight == fmt and element_dtype(fmt) == jnp.float4_e2m1fn and element.bits == 4
    )
    assert row.table()["rollout"]["weight"] == fmt.name == name
    check_recipe(row)  # the reference multiplies the pair
    # on the command line, too, which was read before
    flags = ["--recipe", "jet-rl", "--precision.output-gradient", "f4"]
    asked = load_config(RunConfig, flags, "fp8rl train")
    assert get_recipe("jet-rl", asked.precision).output_gradient.element == "f4"
    with pytest.raises(UserError, match=r"precision\.output_gradient: unknown element 'fp5'"):
        get_recipe("jet-rl", PrecisionConfig(output_gradient="fp5"))
    for again in (
        lambda: register_element(replace(element, bits=8)),
        lambda: register_element(ElementType("compute", "float32", 1.0, 32)),
    ):
        with pytest.raises(UserError, match="is registered already|a name is"):
            again()


def test_the_built_in_rows_are_these():
    """Written out by hand: what recipes.toml says must not drift."""
    assert list(RECIPES) == [
        "bf16",
        "fp8-rollout",
        "fp8-kv",
        "fp8-rl",
        "fp8-e2e",
        "fp8-e2e-kv",
        "jet-rl",
        "infir2",
        "mxfp8-rollout",
        "mxfp8",
        "nvfp4-rollout",
        "nvfp4",
        "mxfp4",
        "nvfp4-rl",
        "w4a16",
        "int4-qat",
        "fp4",
        "fp8-lm-o1",
        "fp8-lm-o2",
        "fp8-lm-o3",
    ]
    assert RECIPES["bf16"] == Recipe("bf16")
    assert FULL == Recipe(
        "fp8-rl", rollout=ForwardFormats(W, A, KV, KV, KV), correction="token_tis"
    )
    assert RECIPES["fp8-rollout"] == replace(FULL, name="fp8-rollout", rollout=ForwardFormats(W, A))
    assert RECIPES["fp8-kv"] == replace(
        FULL, name="fp8-kv", rollout=ForwardFormats(query=KV, key=KV, value=KV)
    )
    both = {"trainer": TrainerFormats(W, A), "output_gradient": A, "saved_activation": A}
    assert RECIPES["fp8-e2e-kv"] == Recipe(
        "fp8-e2e-kv", ForwardFormats(W, A, KV, KV, KV), correction="nemo_is", **both
    )
    w, a = replace(W, scale="power_of_two"), replace(A, scale="power_of_two")
    sides = ForwardFormats(w, a)
    assert RECIPES["infir2"] == Recipe(
        "infir2", sides, sides, output_gradient=a, saved_activation=a
    )
    mx, rows = parse_format("mxfp8"), parse_format("nvfp4_rows")
    assert RECIPES["mxfp8"] == Recipe(
        "mxfp8", ForwardFormats(mx, mx), TrainerFormats(mx, mx), mx, mx
    )
    of_rows = ForwardFormats(parse_format("nvfp4"), rows)
    assert RECIPES["nvfp4-rl"] == Recipe("nvfp4-rl", of_rows, of_rows, saved_activation=rows)
    square = ForwardFormats(parse_format("nvfp4-16x16"), rows)
    assert RECIPES["nvfp4"] == Recipe(
        "nvfp4",
        square,
        square,
        parse_format("nvfp4"),
        rows,
        gradient_rounding="stochastic",
        gradient_transform="hadamard",
        first_layers_in_compute=0.032,
        last_layers_in_compute=0.13,
    )
    mx = parse_format("mxfp4")
    square = ForwardFormats(parse_format("mxfp4-32x32"), mx)
    changed = {"output_gradient": mx, "saved_activation": mx, "name": "mxfp4"}
    assert RECIPES["mxfp4"] == replace(RECIPES["nvfp4"], rollout=square, trainer=square, **changed)
    integers = ForwardFormats(parse_format("int4-1x128"))
    one, each = "e4m3-power_of_two", "e4m3-1xall-power_of_two"
    level = Recipe("fp8-lm-o1", weight_gradient=parse_format(one))
    assert RECIPES["fp8-lm-o1"] == level
    half = parse_format("float16-power_of_two")
    level = replace(level, master=half, first_moment=parse_format(one), second_moment=half)
    level = replace(level, second_moment_rounding="nearest")
    assert RECIPES["fp8-lm-o2"] == level
    both = ForwardFormats(parse_format(one), parse_format(each))
    gradient = parse_format("e5m2-1xall-power_of_two")
    operands = {"output_gradient": gradient, "saved_activation": parse_format(each)}
    assert RECIPES["fp8-lm-o3"] == replace(level, rollout=both, trainer=both, **operands)
    assert RECIPES["int4-qat"] == Recipe("int4-qat", integers, integers)
    clamped = parse_format("fp4_clamped")
    four = ForwardFormats(parse_format("fp4"), clamped)
    assert RECIPES["fp4"] == Recipe(
        "fp4", four, four, saved_activation=clamped, weight_gradient_estimator="differentiable"
    )
    for name, of in (
        ("mxfp8-rollout", "mxfp8"),
        ("nvfp4-rollout", "nvfp4-rl"),
        ("w4a16", "int4-qat"),
    ):
        assert RECIPES[name] == Recipe(name, RECIPES[of].rollout, correction="token_tis")
    assert (FULL.kv_calibration, FULL.kv_percentile, FULL.kv_margin, FULL.kv_constants) == (
        "update",
        99.9,
        1.05,
        None,
    )
    assert FULL.quantized == ("*",)


@pytest.mark.parametrize(
    ("layers", "first", "last"),
    [(62, 2, 8), (32, 1, 4), (30, 1, 4), (16, 1, 2), (12, 0, 2), (6, 0, 1), (4, 0, 1), (3, 0, 0)],
)
def test_nvfp4_keeps_a_part_of_the_layers(layers, first, last):
    """Of 62 layers those of the paper."""
    names = linear_names(replace(CONFIG, num_layers=layers))
    chosen = quantized_layers(RECIPES["nvfp4"], names)
    assert chosen == names[7 * first : 7 * (layers - last)]


@pytest.mark.parametrize("full", [False, True])
def test_a_table_reads_back_equal(full):
    rows = [
        *RECIPES.values(),
        get_recipe("fp8-rl", PrecisionConfig(kv_rule="verl", excluded=("layers.0.*",))),
    ]
    for row in rows:
        table = tomllib.loads(tomli_w.dumps({"row": row.table(full)}))["row"]
        assert (
            read_rows({"row": table}, RECIPES)["row"]
            == recipe_like("bf16", "row", **table)
            == replace(row, name="row")
        )


def test_rows_of_ones_own_lie_over_their_bases():
    rows = tomllib.loads("""
        [mine]
        base = "parent"
        rollout.weight = { element = "e5m2" }
        rollout.key = { block = "none" }
        excluded = ["layers.0.*"]
        [parent]
        base = "fp8-rl"
        kv_constants = [200, 200, 100]
        last_layers_in_compute = 1
        rollout.weight = { scale = "power_of_two" }
        [plain]
    """)
    found = get_recipe("mine", PrecisionConfig(first_layers_in_compute=2), rows)
    assert found.rollout == replace(
        FULL.rollout, weight=TensorFormat("e5m2", (128, 128), "power_of_two")
    )
    assert (found.name, found.correction, found.kv_constants) == (
        "mine",
        "token_tis",
        (200.0, 200.0, 100.0),
    )
    assert (found.first_layers_in_compute, found.last_layers_in_compute, found.excluded) == (
        2,
        1,
        ("layers.0.*",),
    )
    assert get_recipe("plain", rows=rows) == Recipe("plain")
    assert recipe_like(found, rollout=FULL.rollout).rollout == FULL.rollout
    same = recipe_like(
        "fp8-rl",
        "mine",
        rollout={"weight": W},
        output_gradient=A,
        **{"trainer.weight": "e4m3-128x128"},
    )
    assert same == Recipe("mine", FULL.rollout, ForwardFormats(W), A, correction="token_tis")


def test_every_fault_of_a_row_is_named_by_its_key():
    rows = tomllib.loads("""
        [my-fp8]
        base = "fp8-r1"
        rollout.wieght = "e4m3"
        rollout.weight = "e4m3-128"
        rollout.key = 8
        rollout.value = { element = "e4m9" }
        trainer = "e4m3"
        kv_margin = "high"
        optimizer_moment = "e4m3"
        name = "x"
        [low]
        first_layers_in_compute = -1
        [fp8-rl]
        base = 1
        [a]
        base = "b"
        [b]
        base = "c"
        [c]
        base = "a"
        ["../d"]
    """)
    with pytest.raises(UserError) as error:
        get_recipe("my-fp8", None, rows | {"flat": 3})
    lines = str(error.value).splitlines()
    starts = [
        "recipes.my-fp8.base: unknown name 'fp8-r1'; did you mean 'fp8-rl'? (known: bf16, ",
        "recipes.my-fp8.rollout.wieght: unknown key; did you mean rollout.weight?",
        "recipes.my-fp8.rollout.weight: 'e4m3-128' is no format; write ELEMENT",
        "recipes.my-fp8.rollout.key: expected the name of a format, or a table, got 8",
        "recipes.my-fp8.rollout.value: unknown element 'e4m9'; did you mean 'e4m3'?",
        "recipes.my-fp8.trainer: expected a table, got 'e4m3'",
        "recipes.my-fp8.kv_margin: expected a finite number, got 'high'",
        "recipes.my-fp8.optimizer_moment: unknown key",
        "recipes.my-fp8.name: unknown key",
        "recipe 'low': first_layers_in_compute must be at least 0, and is -1",
        'recipes.fp8-rl: is built in; give the row another name, and base = "fp8-rl"',
        "recipes.a.base: the bases go in a circle, a -> b -> c -> a",
        'recipes."../d": a name is of letters, digits, dots, dashes and underscores',
        "recipes.flat: expected a table, got 3",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), (line, start)
    with pytest.raises(
        UserError, match="^recipe 'mine': rollout.wieght: unknown key; did you mean rollout.weight"
    ):
        recipe_like("fp8-rl", "mine", **{"rollout.wieght": "e4m3"})


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(
        UserError, match=r"'fp8-r1'; did you mean 'fp8-rl'\? \(known: bf16, fp8-rollout, .*\)"
    ):
        get_recipe("fp8-r1")
    with pytest.raises(UserError, match=r"'zzz' \(known"):
        get_recipe("zzz")


def test_no_change_gives_the_named_recipe():
    for name, recipe in RECIPES.items():
        assert get_recipe(name) == get_recipe(name, PrecisionConfig()) == recipe


def test_scale_changes_the_block_quantized_roles_only():
    changed = get_recipe("fp8-rl", PrecisionConfig(scale="power_of_two")).rollout
    assert changed.weight == replace(W, scale="power_of_two") and changed.activation == replace(
        A, scale="power_of_two"
    )
    assert (changed.query, changed.key, changed.value) == (KV, KV, KV)
    assert get_recipe("bf16", PrecisionConfig(scale="power_of_two")) == RECIPES["bf16"]


def test_scales_of_one_side():
    jet = RECIPES["jet-rl"]
    served = get_recipe("jet-rl", PrecisionConfig(rollout=SideScales("power_of_two")))
    assert served == replace(jet, rollout=RECIPES["infir2"].rollout)
    trained = get_recipe(
        "jet-rl", PrecisionConfig(scale="power_of_two", trainer=SideScales("float32", 64))
    )
    blocks = TrainerFormats(replace(W, block=(64, 64)), replace(A, block=(1, 64)))
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
        with pytest.raises(
            UserError,
            match=rf"precision\.{side}\.scale: recipe '{name}' quantizes no linear in the {side}",
        ):
            get_recipe(name, PrecisionConfig(**{side: SideScales("power_of_two")}))
    with pytest.raises(
        UserError, match=r"precision\.trainer\.block: 0 must be a number of at least 2"
    ):
        get_recipe("jet-rl", PrecisionConfig(trainer=SideScales(block=0)))


def test_a_block_without_kernels_is_refused_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(check, "selected_backend", lambda backend: "hopper")
    recipe = get_recipe("jet-rl", PrecisionConfig(rollout=SideScales(block=32)))
    check_recipe(recipe, "auto")
    with pytest.raises(
        UserError, match=r"rollout\.weight\.block is 32x32, and the hopper backend has 128x128"
    ):
        check_recipe(recipe, "hopper")


def test_power_of_two_scales_of_the_trainer_are_infir2():
    changed = get_recipe("jet-rl", PrecisionConfig(scale="power_of_two"))
    assert replace(changed, name="infir2") == RECIPES["infir2"]
    blocks = [
        f
        for f in (
            *vars(changed.trainer).values(),
            changed.output_gradient,
            changed.saved_activation,
        )
        if f.quantized
    ]
    assert len(blocks) == 4 and all(f.scale == "power_of_two" for f in blocks)


def test_end_to_end_and_jet_rl_are_one_flow_and_differ_by_correction():
    jet, end = RECIPES["jet-rl"], RECIPES["fp8-e2e"]
    assert replace(end, name="jet-rl", correction="none") == jet and end.correction == "nemo_is"
    cached = RECIPES["fp8-e2e-kv"]
    assert replace(cached, name="fp8-e2e", rollout=end.rollout) == end and cached.rollout.key == KV


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipes_correction_is_the_preset_of_that_name(name):
    """What rl.correction.method = "recipe" becomes; an end-to-end recipe's weights are not
    truncated."""
    filled = CorrectionConfig().resolve(RECIPES[name].correction)
    assert filled == CorrectionConfig(method=RECIPES[name].correction).filled()
    if name.startswith("fp8-e2e"):
        assert (filled.weights, filled.bounds, filled.overflow) == ("token", "keep", "zero")


def test_an_output_gradient_with_its_own_quantizer_has_its_usual_blocks():
    def gradient(element, **more):
        asked = PrecisionConfig(output_gradient=element, **more)
        check.check_formats(changed := get_recipe("jet-rl", asked))
        return changed.output_gradient.name

    for name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4_rows", "fp4"):
        assert gradient(name) == parse_format(name).name
    assert gradient("mxfp8") == "mxfp8-1x32" and gradient("fp4") == "fp4-1xall"
    # what a scale is shared by is the recipe's, or what was asked for
    assert gradient("e3m2") == "e3m2-1x128"
    assert gradient("e5m2", scale="power_of_two") == "e5m2-1x128-power_of_two"
    assert gradient("mxfp8", trainer=SideScales(block=64)) == "mxfp8-1x64"
    with pytest.raises(
        UserError, match=r"output_gradient\.scale is not of mxfp8, which has a rule"
    ):
        gradient("mxfp8", scale="power_of_two")


def test_output_gradient_format():
    assert get_recipe("jet-rl", PrecisionConfig(output_gradient="e5m2")).output_gradient == replace(
        A, element="e5m2"
    )
    assert (
        get_recipe("jet-rl", PrecisionConfig(output_gradient="compute")).output_gradient == COMPUTE
    )
    plain = {"mine": {"base": "jet-rl", "output_gradient": "compute"}}
    assert get_recipe(
        "mine", PrecisionConfig(output_gradient="e5m2"), plain
    ).output_gradient == replace(A, element="e5m2")
    with pytest.raises(
        UserError,
        match="precision.output_gradient: the linears of recipe 'fp8-rl' are not trained in FP8",
    ):
        get_recipe("fp8-rl", PrecisionConfig(output_gradient="e5m2"))


def test_calibration_and_exclusion_change_the_recipe():
    changed = get_recipe(
        "fp8-rl", PrecisionConfig(excluded=("layers.0.*",), kv_calibration="rollout")
    )
    assert changed.excluded == ("layers.0.*",) and changed.kv_calibration == "rollout"
    assert get_recipe("fp8-rl", PrecisionConfig(kv_prompts=3)).kv_prompts == 3
    with pytest.raises(
        UserError, match=r"precision\.kv_prompts: -1 must be a number of at least 0"
    ):
        get_recipe("fp8-rl", PrecisionConfig(kv_prompts=-1))
    for change in ({"kv_calibration": "rollout"}, {"kv_rule": "verl"}, {"kv_prompts": 3}):
        with pytest.raises(
            UserError, match=f"precision.{next(iter(change))}: recipe 'jet-rl' has no queries, keys"
        ):
            get_recipe("jet-rl", PrecisionConfig(**change))
    with pytest.raises(UserError, match="precision.excluded: recipe 'fp8-kv' quantizes no linear"):
        get_recipe("fp8-kv", PrecisionConfig(excluded=("layers.0.*",)))


def test_all_linears_in_model_order():
    names = linear_names(CONFIG)
    assert len(names) == 21 and names[0] == "layers.0.q_proj"
    assert quantized_layers(FULL, names) == names
    assert (
        quantized_layers(RECIPES["bf16"], names) == quantized_layers(RECIPES["fp8-kv"], names) == ()
    )


def test_exclusion():
    names = linear_names(CONFIG)
    chosen = quantized_layers(replace(FULL, excluded=("layers.1.*", "*.o_proj")), names)
    assert chosen == tuple(
        n for n in names if not n.startswith("layers.1.") and not n.endswith("o_proj")
    )
    two = replace(FULL, quantized=("layers.2.[gu]*_proj",))
    assert quantized_layers(two, names) == ("layers.2.gate_proj", "layers.2.up_proj")


def test_first_and_last_layers_in_the_compute_dtype():
    names = linear_names(CONFIG)
    changed = get_recipe(
        "fp8-e2e", PrecisionConfig(first_layers_in_compute=1, last_layers_in_compute=1)
    )
    assert quantized_layers(changed, names) == tuple(n for n in names if n.startswith("layers.1."))
    assert quantized_layers(replace(changed, first_layers_in_compute=0), names) == names[:14]
    with pytest.raises(
        UserError,
        match="first_layers_in_compute = 1 and last_layers_in_compute = 2 leave none of 3 layers",
    ):
        quantized_layers(replace(changed, last_layers_in_compute=2), names)
    with pytest.raises(
        UserError, match=r"precision\.last_layers_in_compute: recipe 'bf16' quantizes no linear"
    ):
        get_recipe("bf16", PrecisionConfig(last_layers_in_compute=1))
    for value, message in (
        (-1, r"precision\.first_layers_in_compute: -1 must be a number of at least 0"),
        (1.5, "first_layers_in_compute = 1.5 is neither a number of layers nor, below 1, a part"),
    ):
        with pytest.raises(UserError, match=message):
            get_recipe("fp8-rl", PrecisionConfig(first_layers_in_compute=value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"excluded": ("layers.7.*",)},
            r"excluded pattern 'layers\.7\.\*' matches no linear.*layers\.0\.q_proj",
        ),
        (
            {"quantized": ("*.q_proj", "*.qkv_proj")},
            r"quantized pattern '\*\.qkv_proj' matches no linear",
        ),
        # whole names, never substrings
        ({"excluded": ("q_proj",)}, "excluded pattern 'q_proj' matches no linear"),
        ({"excluded": ("*.Q_PROJ",)}, "matches no linear"),
        ({"excluded": ("*",)}, "every linear is excluded"),
    ],
)
def test_patterns_that_do_nothing_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        quantized_layers(replace(FULL, **changes), linear_names(CONFIG))


JET = RECIPES["jet-rl"]
DOWN = LayerFormats("*.down_proj", (("output_gradient", COMPUTE),))
FIRST = LayerFormats("layers.0.*", (("rollout.weight", COMPUTE), ("trainer.weight", COMPUTE)))


def test_layers_are_read_from_tables_and_taken_over_from_the_base():
    rows = tomllib.loads("""
        [mine]
        base = "parent"
        layers."*.down_proj".rollout.weight = { scale = "power_of_two" }
        layers."layers.2.*" = { rollout = { weight = "e5m2-128x128" }, output_gradient = "compute" }
        [parent]
        base = "jet-rl"
        layers."*.down_proj".output_gradient = "e5m2-1x128"
    """)
    five, groups = replace(A, element="e5m2"), replace(W, scale="power_of_two")
    parent, mine = read_rows(rows, RECIPES)["parent"], get_recipe("mine", None, rows)
    assert parent.layers == (LayerFormats("*.down_proj", (("output_gradient", five),)),)
    assert mine.layers == (
        LayerFormats("*.down_proj", (("rollout.weight", groups), ("output_gradient", five))),
        LayerFormats(
            "layers.2.*",
            (("rollout.weight", replace(W, element="e5m2")), ("output_gradient", COMPUTE)),
        ),
    )
    # of two patterns that match, the later one counts
    both = mine.of_linear("layers.2.down_proj")
    assert (both.rollout.weight.element, both.output_gradient) == ("e5m2", COMPUTE)
    assert both.trainer == JET.trainer and both.layers == ()
    assert mine.of_linear("layers.1.down_proj") == mine.with_formats(*[mine.layers[0].formats])
    assert mine.of_linear("layers.1.up_proj") == replace(mine, layers=())
    assert len(mine.variants) == 3


def test_a_weight_in_the_compute_dtype_takes_its_activation_and_gradients_along():
    recipe = replace(JET, layers=(DOWN, FIRST))
    check_recipe(recipe)
    for linear in ("layers.0.up_proj", "layers.0.down_proj"):
        plain = recipe.of_linear(linear)
        assert plain.rollout == ForwardFormats() and plain.trainer == TrainerFormats()
        assert plain.output_gradient == plain.saved_activation == COMPUTE
        assert not plain.quantizes_linears
    down = recipe.of_linear("layers.1.down_proj")
    assert down == replace(JET, output_gradient=COMPUTE)
    one_side = replace(JET, layers=(LayerFormats("layers.0.*", FIRST.formats[:1]),))
    found = one_side.of_linear("layers.0.up_proj")
    assert found.rollout == ForwardFormats() and found.trainer == JET.trainer
    assert found.output_gradient == JET.output_gradient
    names = linear_names(CONFIG)
    assert quantized_layers(recipe, names) == tuple(n for n in names if "layers.0." not in n)
    assert quantized_layers(one_side, names) == names
    assert why_in_compute(recipe, names[0], 3) == "in the compute dtype by recipe.layers"


def test_layers_alone_quantize():
    """Over a base in the compute dtype."""
    formats = tuple(
        (f"{side}.{role}", fmt)
        for role, fmt in (("weight", W), ("activation", A))
        for side in ("rollout", "trainer")
    )
    recipe = replace(RECIPES["bf16"], layers=(LayerFormats("*.up_proj", formats),))
    check_recipe(recipe)
    assert recipe.quantizes("rollout") and recipe.quantizes("trainer")
    names = linear_names(CONFIG)
    assert quantized_layers(recipe, names) == tuple(n for n in names if n.endswith("up_proj"))


def test_every_fault_of_a_layers_table_is_named_by_its_key():
    rows = tomllib.loads("""
        [mine]
        base = "jet-rl"
        layers."*.up_proj".rollout.weigth = "e4m3-128x128"
        layers."*.up_proj".rollout.weight = "e4m3-128"
        layers."*.up_proj".rollout.key = "e4m3"
        layers."*.up_proj".kv_margin = 1.0
        layers."*.down_proj" = "e4m3-128x128"
    """)
    with pytest.raises(UserError) as error:
        get_recipe("mine", None, rows)
    starts = [
        'recipes.mine.layers."*.up_proj".rollout.weigth: unknown key; did you mean rollout.weight?',
        'recipes.mine.layers."*.up_proj".rollout.key: unknown key',
        'recipes.mine.layers."*.up_proj".kv_margin: unknown key',
        "recipes.mine.layers.\"*.up_proj\".rollout.weight: 'e4m3-128' is no format; write ELEMENT",
        "recipes.mine.layers.\"*.down_proj\": expected a table, got 'e4m3-128x128'",
    ]
    lines = str(error.value).splitlines()
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), (line, start)
    with pytest.raises(UserError, match=r"rollout\.key is no role of a linear \(known: rollout\.w"):
        LayerFormats("*", (("rollout.key", KV),))


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ((("rollout.weight", TensorFormat("e4m3", (64, 64))),), r"rollout\.activation\.block must"),
        (
            (("trainer.activation", COMPUTE),),
            r"output_gradient is quantized, but trainer\.activation is not",
        ),
        ((("output_gradient", TensorFormat("e4m3", (1, 64))),), r"output_gradient\.block must be"),
    ],
)
def test_formats_of_a_pattern_that_cannot_be_computed_are_refused_with_it(formats, message):
    recipe = replace(JET, layers=(LayerFormats("*.up_proj", formats),))
    with pytest.raises(UserError, match=rf'recipe \'jet-rl\': layers\."\*\.up_proj": {message}'):
        check_recipe(recipe)


def test_exact_needs_the_same_formats_on_both_sides_of_every_pattern():
    check_recipe(replace(JET, exact=True, layers=(FIRST,)))
    one_side = replace(JET, exact=True, layers=(LayerFormats("*.up_proj", FIRST.formats[:1]),))
    with pytest.raises(UserError, match=r'layers\."\*\.up_proj": exact cannot be promised: the r'):
        check_recipe(one_side)


def test_a_pattern_of_layers_that_matches_nothing_is_refused():
    recipe = replace(JET, layers=(LayerFormats("layers.7.*", DOWN.formats),))
    with pytest.raises(UserError, match=r"layers pattern 'layers\.7\.\*' matches no linear of the"):
        quantized_layers(recipe, linear_names(CONFIG))


@pytest.mark.parametrize("full", [False, True])
def test_layers_and_the_granularity_of_kv_scales_survive_a_run_s_config_toml(tmp_path, full):
    row = replace(RECIPES["fp8-e2e-kv"], name="mine", layers=(DOWN, FIRST), kv_granularity="head")
    config = RunConfig(recipe="mine", recipes={"mine": row.table(full)})
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    again = read_config(RunConfig, path)
    assert get_recipe(again.recipe, again.precision, again.recipes) == row


def test_scales_of_one_side_change_the_formats_of_layers_too():
    rule = LayerFormats("*.up_proj", (("rollout.weight", W), ("output_gradient", A)))
    rows = {"mine": replace(JET, name="mine", layers=(rule,)).table()}
    changes = PrecisionConfig(rollout=SideScales("power_of_two"), trainer=SideScales(block=64))
    (found,) = get_recipe("mine", changes, rows).layers
    groups = replace(A, block=(1, 64))
    assert found.formats == (
        ("rollout.weight", replace(W, scale="power_of_two")),
        ("output_gradient", groups),
    )

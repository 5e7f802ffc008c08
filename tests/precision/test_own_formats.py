"""A format with a quantizer of its own, added in one file from outside of the package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_formats
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from tiny_run import LEARNS, metric_rows, train, write_run
from toy_formats import TWO_LEVELS, TwoLevels

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.files import read_recipes
from fp8rl_jax.config.formats import TensorFormat, parse_format
from fp8rl_jax.config.recipe import STATE_ROLES, LinearPrecision, PrecisionConfig, Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import quantized_base, rollout_policy
from fp8rl_jax.models.lora import merge
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import policy_shardings
from fp8rl_jax.parallel.mesh import AXES
from fp8rl_jax.precision import QuantizedWeight, check_recipe, format_of, linear, register
from fp8rl_jax.training.state import kept_masters, make_optimizer
from fp8rl_jax.weights.load import load_policy, save_policy

ALL = LinearPrecision(*[TWO_LEVELS] * 4)
ROW = {
    "base": "jet-rl",
    "rollout": {"weight": "two_levels", "activation": "two_levels"},
    "trainer": {"weight": "two_levels", "activation": "two_levels"},
    "output_gradient": "two_levels",
    "saved_activation": "two_levels",
}


def draw(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=shape))).astype(np.float32)


def restored(x, along_rows=False):
    """By the definition, in float64."""
    x = np.asarray(x, np.float64)
    if along_rows:
        return restored(x.T).T
    out = np.zeros_like(x)
    for row, into in zip(x, out, strict=True):
        groups = [slice(i, i + 16) for i in range(0, len(row), 16)]
        amax = np.array([np.abs(row[part]).max() for part in groups])
        outer = amax.max() / (7 * 448) or 1.0
        scales = np.asarray(jnp.asarray(amax / 7 / outer).astype(jnp.float8_e4m3fn), np.float64)
        for part, step in zip(groups, scales * outer, strict=True):
            into[part] = np.clip(np.round(row[part] / (step or 1.0)), -7, 7) * step
    return out


def test_a_name_stands_for_it_and_its_blocks():
    assert parse_format("two_levels") == TWO_LEVELS == TensorFormat("two_levels", (1, 16))
    assert format_of(parse_format("two_levels-1x32")) == TwoLevels((1, 32))
    assert (
        TWO_LEVELS.name == "two_levels-1x16" and register("two_levels", TwoLevels()) == TWO_LEVELS
    )
    with pytest.raises(UserError, match="'two_levels' is registered already"):
        register("two_levels", TwoLevels((1, 8)))
    with pytest.raises(UserError, match="'e4m3' is registered already"):
        register("e4m3", TwoLevels())
    with pytest.raises(UserError, match="'two_levels' cannot be stored as one element type"):
        _ = TWO_LEVELS.element_type


@pytest.mark.parametrize("tokens", [32, 7])
def test_products_are_those_of_what_it_stands_for(tokens):
    """Forward and both gradients, each operand grouped along its own contraction and rounded once;
    an odd number of tokens is packed, too."""
    x, w, dy = draw(tokens, 48), draw(40, 48, seed=1), draw(tokens, 40, seed=2)

    @jax.jit
    def products(x, w, dy):
        def run(x, w):
            return linear(x, QuantizedWeight.of(w, w, ALL), jnp.float32)

        y, back = jax.vjp(run, x, w)
        return y, *back(dy)

    even = [np.pad(z, ((0, tokens % 2), (0, 0))) for z in (dy, x)]
    left, right = (restored(z, along_rows=True) for z in even)
    turned = restored(w, along_rows=True)
    expected = (restored(x) @ restored(w).T, restored(dy) @ turned, left.T @ right)
    for got, want in zip(products(x, w, dy), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_products_of_experts_are_those_of_what_it_stands_for():
    """Rows sorted by expert, the last ones nobody's. For the gradient of their weights an expert's
    rows begin at a group of their own."""
    x, w, dy = draw(34, 48), draw(3, 40, 48, seed=1), draw(34, 40, seed=2)
    sizes = jnp.array([12, 0, 20], jnp.int32)
    parts, laid_out = ((0, 12), (12, 12), (12, 32)), ((0, 12), (16, 16), (16, 36))

    @jax.jit
    def products(x, w, dy):
        def run(x, w):
            return linear(x, QuantizedWeight.of(w, w, ALL), jnp.float32, group_sizes=sizes)

        y, back = jax.vjp(run, x, w)
        return y, *back(dy)

    xq, dyq, wq = restored(x), restored(dy), [restored(one) for one in w]
    left, right = np.zeros((48, 40)), np.zeros((48, 48))
    for (start, stop), (first, last) in zip(parts, laid_out, strict=True):
        left[first:last], right[first:last] = dy[start:stop], x[start:stop]
    left, right = restored(left, along_rows=True), restored(right, along_rows=True)
    expected = np.zeros((34, 40)), np.zeros((34, 48)), np.zeros((3, 40, 48))
    for i, ((start, stop), (first, last)) in enumerate(zip(parts, laid_out, strict=True)):
        expected[0][start:stop] = xq[start:stop] @ wq[i].T
        expected[1][start:stop] = dyq[start:stop] @ restored(w[i], along_rows=True)
        expected[2][i] = left[first:last].T @ right[first:last]
    for got, want in zip(products(x, w, dy), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_its_arrays_are_placed_like_the_weight():
    shape = PolicyConfig("qwen3", 64, 256, 512, 2, 4, 2, 64)
    recipe = Recipe("mine").with_formats((("rollout.weight", TWO_LEVELS),))
    policy = jax.eval_shape(lambda key: init_policy(shape, key), jax.random.key(0))
    served = jax.eval_shape(lambda p: rollout_policy(p, recipe, jnp.float32, False)[0], policy)
    mesh = AbstractMesh((1, 2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    placed = policy_shardings(served, mesh).layers.q_proj.value.quantized
    whole = PartitionSpec(None, "tensor", "fsdp")
    assert placed.values.spec == placed.scales.spec == whole
    assert placed.outer.spec == PartitionSpec(None, "tensor", None)
    assert served.layers.q_proj.value.quantized.values.shape == (2, 256, 128)  # two to a byte


def test_a_frozen_base_in_it_is_unpacked_where_it_is_saved(tmp_path):
    policy = init_policy(PolicyConfig("qwen3", 64, 32, 48, 2, 2, 1, 16), jax.random.key(0))
    recipe = Recipe("mine").with_formats((("rollout.weight", TWO_LEVELS),))
    merged = merge(quantized_base(policy, recipe, jnp.float32))
    expected = [restored(matrix) for matrix in np.asarray(policy.layers.down_proj.value)]
    saved = save_policy(merged, tmp_path / "out", dtype="float32")
    for each in (merged, load_policy(saved)):
        np.testing.assert_allclose(each.layers.down_proj.value, expected, rtol=1e-6)


def test_what_no_kernel_takes_is_refused_by_name(monkeypatch):
    recipe = Recipe("mine").with_formats(
        (("rollout.weight", TWO_LEVELS), ("rollout.activation", TWO_LEVELS))
    )
    check_recipe(recipe)
    monkeypatch.setattr("fp8rl_jax.precision.check.selected_backend", lambda backend: backend)
    with pytest.raises(UserError, match=r"rollout\.activation .* no kernel takes two_levels-1x16"):
        check_recipe(recipe, "hopper")
    scaled = Recipe("mine").with_formats(
        (("rollout.weight", replace(TWO_LEVELS, scale="power_of_two")),)
    )
    with pytest.raises(UserError, match="two_levels, which has a rule of its own"):
        check_recipe(scaled)


def test_moments_rest_in_it():
    """The first to nearest; the second right in the mean, and never 0 where something is."""
    kept = Recipe("mine", **dict.fromkeys(STATE_ROLES, TWO_LEVELS))
    adam = make_optimizer(OptimizerConfig(learning_rate=1.0, max_grad_norm=0.0), 1, kept)
    weight, gradient = {"w": jnp.ones((4, 64))}, {"w": jnp.asarray(draw(4, 64))}
    masters = kept_masters(weight, kept)
    after, state, finite = adam.step(
        masters, gradient, adam.init(masters), jnp.float32(1), jnp.int32(0)
    )
    # a step of Adam's is the sign of the gradient
    expected = restored(1 - np.sign(gradient["w"]))
    np.testing.assert_allclose(after["w"].dequantize(), expected, atol=0.15)
    mean, square = 0.1 * np.asarray(gradient["w"]), 0.01 * np.asarray(gradient["w"]) ** 2
    assert finite
    np.testing.assert_allclose(state[0].mu["w"].dequantize(), restored(mean), rtol=1e-5)
    fmt = format_of(TWO_LEVELS)
    draws = jax.vmap(lambda key: fmt.store(square, key).dequantize())(
        jax.random.split(jax.random.key(0), 1000)
    )
    step = np.asarray(fmt.limit(fmt.quantize(square))) / 7
    above = square > step
    off = np.abs(np.asarray(draws).mean(0) - square)
    assert np.all(off[above] < 0.1 * step[above]) and np.all(np.asarray(draws)[:, square > 0] > 0)


def test_moments_in_what_cannot_be_are_refused():
    def said(beta2=0.99, **formats) -> str:
        asked = PrecisionConfig(**formats)
        config = RunConfig(precision=asked, optimizer=OptimizerConfig(beta2=beta2))
        if faults := [line for line in config.problems() if "sft." not in line]:
            return "\n".join(faults)
        try:
            check_recipe(config.resolved_recipe)
        except UserError as error:
            return str(error)
        return ""

    taken = ("e5m2", "e5m2-1x64", "e4m3-1x128-power_of_two", "bfloat16", "float16-power_of_two")
    assert not any(said(first_moment=name) for name in (*taken, "two_levels", "mxfp8"))
    assert not said(second_moment="two_levels", master="two_levels", weight_gradient="two_levels")
    assert "precision.second_moment: unknown element 'e9m9'" in said(second_moment="e9m9-1x8")
    assert "first_moment: a training state does not follow" in said(first_moment="compute")
    assert "bfloat16 takes neither scale nor block" in said(master="bfloat16-1x128")
    assert "float16 without a scale has no block" in said(master="float16-1x128")
    assert "second_moment = 'mxfp8': the format has no `store`" in said(second_moment="mxfp8")
    assert "beta2 = 0.99: an e5m2 second moment needs at most 0.95" in said(
        second_moment="e5m2-1x128"
    )
    assert not said(beta2=0.95, second_moment="e5m2-1x128")
    with pytest.raises(UserError, match=r"rollout\.weight: bfloat16 is of what is kept between"):
        Recipe("mine").with_formats((("rollout.weight", parse_format("bfloat16")),))


def test_a_run_a_plan_doctor_a_comparison_and_an_export_know_it(tmp_path, capsys):
    """Of the file that the run names, which nothing has imported yet."""
    source = Path(toy_formats.__file__).read_text()
    (tmp_path / "mine.py").write_text(source.replace('"two_levels"', '"of_a_file"'))
    kept = dict.fromkeys(("weight_gradient", "first_moment", "second_moment"), "two_levels")
    row = json.loads(json.dumps(ROW | kept).replace("two_levels", "of_a_file"))
    mine = {"recipe": "mine", "recipes": {"mine": row}, "trainer": {"steps": 2}}
    run = write_run(tmp_path, LEARNS, mine, {"formats": [str(tmp_path / "mine.py")]})
    assert main(["doctor", "--recipes", run, "--recipe", "mine"]) == 0
    assert "of_a_file-1x16 weights, of_a_file-1x16 activations" in capsys.readouterr().out
    assert train(run, tmp_path / "run", "--precision.exact", "false") == 0
    first, second = metric_rows(tmp_path / "run")
    assert 5 < first["fp8/quant_snr_db_weight"] < 25  # 3 bits
    assert abs(first["mismatch/k3"]) < 1e-6  # one flow
    assert 0 < second["sync/changed"] < 1
    capsys.readouterr()
    model = str(tmp_path / "run" / "model")
    assert main(["plan", run, "--model.path", model]) == 0
    assert "rollout weights (of_a_file" in capsys.readouterr().out
    words = ["--recipe", "mine", "--b.recipe", "jet-rl", "--recipes", run]
    assert main(["compare", model, *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "weight: of_a_file 1x16 against e4m3 128x128 float32 scales" in text
    for name in ("rollout", "of_a_file"):
        words = ["--model", str(tmp_path / "run"), "--format", name]
        assert main(["export", *words, "--output", str(tmp_path / "out")]) == 2
        assert "cannot be exported, no layout is known for it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_of_formats_that_cannot_be_is_one_line(tmp_path):
    for formats, message in (
        ('["nowhere.py"]', "formats: 'nowhere.py' does not import: FileNotFoundError"),
        ('"nowhere.py"', "formats: expected a list of strings"),
    ):
        (tmp_path / "mine.toml").write_text(f"formats = {formats}\n[recipes.mine]\n")
        with pytest.raises(UserError, match=f"mine.toml: {message}"):
            read_recipes([str(tmp_path / "mine.toml")])

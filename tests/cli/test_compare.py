"""`fp8rl compare`: what it prints and writes, its exit codes, and what it refuses."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from offline_models import make_model, random_rows

from fp8rl_jax.cli import main as cli
from fp8rl_jax.cli.compare import CompareArguments
from fp8rl_jax.cli.load import parse_arguments
from fp8rl_jax.compare.text import WIDTH, grouped
from fp8rl_jax.config.recipe import TensorFormat
from fp8rl_jax.weights.hf_directory import export_policy, load_policy_arrays


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of token ids: no tokenizer."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in random_rows([9, 6, 4])))
    return str(path)


def compare(*words) -> int:
    return cli.main(["compare", *map(str, words)])


def test_a_rollout_against_its_trainer(model, lines, tmp_path, capsys):
    written = tmp_path / "runs" / "compare.json"
    flags = (
        "--recipe",
        "fp8-rollout",
        "--compute-dtype",
        "float32",
        "--input",
        lines,
        "--rows",
        "2",
        "--json",
        written,
    )
    assert compare(model, *flags) == 0
    text = capsys.readouterr().out
    precision = "of the fp8-rollout recipe, float32 compute"
    assert (
        f"a: {model}, rollout {precision}\nb: {model}, trainer {precision}\n2 of 3 rows: " in text
    )
    assert (
        "first format: layers.0.q_proj, in the prompt and completion: weight: e4m3 128x128 "
        "float32 scales" in text
    )
    assert (
        "\nq_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj in all 2 layers\n"
        "  a: e4m3-128x128 weights, e4m3-1x128 activations\n"
        "  b: float32\n"
        "only a quantizes 14 of 14 linears: all of them\n" in text
    )
    assert all(len(line) <= WIDTH for line in text.splitlines()[3:])
    results = json.loads(written.read_text())
    assert (
        results["first"][0]["cause"] == "format"
        and not results["equal"]
        and len(results["layers"]) == 2
    )
    assert results["tokens"] == {
        "rows": 2,
        "prompt": 7,
        "completion": 8,
        "rows_given": 3,
        "given": 19,
    }
    named = {x["name"]: x for x in results["layers"][0]["operations"]}
    for name in ("q_proj", "down_proj"):
        row = text[text.index("layer  ") :].splitlines()[1]
        assert f"{named[name]['own']['relative_error']:.0e}".replace("e-0", "e-") + "f" in row
    # the same once more, where any difference is a failure
    assert compare(model, *flags, "--expect-equal") == 1


@pytest.mark.slow
def test_another_scale_rule_in_the_rollout_is_named_on_both_sides(model, lines, capsys):
    flags = ("--recipe", "fp8-e2e", "--compute-dtype", "float32", "--input", lines)
    assert compare(model, *flags, "--precision.rollout.scale", "power_of_two") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(
        f"{side} of the fp8-e2e recipe, float32 compute" in text for side in ("rollout", "trainer")
    )
    assert (
        "first format: layers.0.q_proj, in the prompt and completion: weight: e4m3 128x128 "
        "power_of_two scales against" in text
    )
    assert (
        "against e4m3 128x128 float32 scales; activation: e4m3 1x128 power_of_two scales against "
        "e4m3 1x128 float32" in text
    )
    assert "both sides quantize the same 14 of 14 linears" in text and "only a" not in text
    assert compare(model, *flags) == 0
    assert "first format" not in capsys.readouterr().out


def test_equal_sides_are_equal(model, lines, capsys):
    flags = (
        "--compute-dtype",
        "float32",
        "--input",
        lines,
        "--a.phase",
        "trainer",
        "--b.phase",
        "trainer",
        "--expect-equal",
    )
    assert compare(model, *flags) == 0
    text = capsys.readouterr().out
    assert "every bit is equal" in text and "log-probabilities of 10 tokens: equal" in text
    table = text[text.index("layer  ") :].splitlines()[1:4]
    assert [set(row.split()[1:]) for row in table] == [{"·"}] * 3


@pytest.mark.slow
def test_what_an_engine_recorded_is_nearest_to_the_side_that_it_ran(model, lines, tmp_path, capsys):
    answers, written = tmp_path / "answers.jsonl", tmp_path / "compare.json"
    sampled = ("--recipe", "fp8-rollout", "--compute-dtype", "float32", "--temperature", "0.7")
    asked = (
        "--model",
        model,
        "--input",
        lines,
        "--output",
        answers,
        "--max-new-tokens",
        "6",
        "--ignore-eos",
        *sampled,
    )
    assert cli.main(["generate", *map(str, asked)]) == 0
    assert (
        compare(
            model, "--input", answers, "--recorded", "policy_logprobs", "--json", written, *sampled
        )
        == 0
    )
    results, text = json.loads(written.read_text()), capsys.readouterr().out
    rollout, trainer = (results["recorded"][side] for side in "ab")
    assert rollout["tokens"] == trainer["tokens"] == results["logprobs"]["tokens"] == 18
    assert rollout["max_abs"] < 1e-5 < 1e-3 < trainer["max_abs"]
    assert trainer["max_abs"] == pytest.approx(results["logprobs"]["max_abs"], rel=0.01)
    assert f"policy_logprobs against side b of 18 tokens: {trainer['differing']:.0%} differ" in text
    # at another temperature they are other numbers
    assert (
        compare(
            model,
            "--input",
            answers,
            "--recorded",
            "policy_logprobs",
            "--json",
            written,
            *sampled[:4],
        )
        == 0
    )
    assert json.loads(written.read_text())["recorded"]["a"]["max_abs"] > 0.01


@pytest.mark.parametrize(
    ("flags", "phases", "recipes"),
    [
        ((), ("rollout", "trainer"), ("bf16", "bf16")),
        (("--b.phase", "rollout"), ("trainer", "rollout"), ("bf16", "bf16")),
        (
            ("--a.phase", "trainer", "--b.phase", "trainer"),
            ("trainer", "trainer"),
            ("bf16", "bf16"),
        ),
        (("--b.recipe", "fp8-rl"), ("rollout", "rollout"), ("bf16", "fp8-rl")),
        (
            ("--b.recipe", "jet-rl", "--a.phase", "trainer"),
            ("trainer", "trainer"),
            ("bf16", "jet-rl"),
        ),
        (
            ("--recipe", "jet-rl", "--b.precision.scale", "power_of_two"),
            ("rollout", "rollout"),
            ("jet-rl", "jet-rl"),
        ),
    ],
)
def test_what_is_unset_follows_from_the_rest(flags, phases, recipes):
    a, b = parse_arguments(CompareArguments, ["m", *flags], "fp8rl compare").sides()
    assert (a.phase, b.phase) == phases and (a.recipe.name, b.recipe.name) == recipes


def test_a_side_s_own_changes_lie_over_those_of_both():
    words = [
        "m",
        "n",
        "--recipe",
        "fp8-rollout",
        "--precision.excluded",
        "layers.0.*",
        "--b.precision.scale",
        "power_of_two",
    ]
    a, b = parse_arguments(CompareArguments, words, "fp8rl compare").sides()
    assert (a.model, b.model) == ("m", "n") and a.recipe.excluded == b.recipe.excluded == (
        "layers.0.*",
    )
    assert (a.recipe.rollout.weight.scale, b.recipe.rollout.weight.scale) == (
        "float32",
        "power_of_two",
    )
    words += ["--precision.rollout.block", "64", "--a.precision.rollout.scale", "power_of_two"]
    a, b = parse_arguments(CompareArguments, words, "fp8rl compare").sides()
    assert a.recipe.rollout == b.recipe.rollout and a.recipe.rollout.weight == TensorFormat(
        "e4m3", (64, 64), "power_of_two"
    )


def test_sides_may_name_a_row_of_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[recipes.mine]\nbase = "fp8-rollout"\nrollout.weight = {scale = "power_of_two"}'
    )
    words = ["m", "--recipes", str(file), "--recipe", "fp8-rollout", "--b.recipe", "mine"]
    a, b = parse_arguments(CompareArguments, words, "fp8rl compare").sides()
    assert (a.recipe.name, b.recipe.name, b.recipe.rollout.weight.scale) == (
        "fp8-rollout",
        "mine",
        "power_of_two",
    )
    assert a.recipe.rollout.activation == b.recipe.rollout.activation


def test_what_cannot_work_is_one_line(model, lines, tmp_path, tmp_path_factory, capsys):
    other = make_model(tmp_path_factory.mktemp("other"), hidden_size=32)
    cases = (
        ((), "MODEL: give one model, or one for each side; got 0"),
        ((model, model, model), "MODEL: give one model, or one for each side; got 3"),
        ((model,), "the model has no tokenizer: give token ids, --input FILE with lines such as"),
        (
            (model, "--text", "abc", "--input", lines),
            "--text: there is an --input; give one of them",
        ),
        ((model, "--recorded", "logprobs"), "--recorded: needs an --input, whose lines hold it"),
        (
            (model, "--input", lines, "--recorded", "logprobs", "--engine", "vllm"),
            "--recorded: with --engine vllm the server's are; leave it out",
        ),
        (
            (model, "--engine", "vllm", "--input", lines),
            "has no tokenizer, which vLLM asks for",
        ),
        ((model, "--temperature", "0"), "--temperature: 0.0 must be positive and finite"),
        ((model, "--rows", "0"), "--rows: 0 must be at least 1"),
        ((model, "--max-tokens", "1"), "--max-tokens: 1 must be at least 2"),
        ((model, "--recipe", "fp8"), "recipe: unknown name 'fp8'"),
        ((model, "--a.recipe", "bf17"), "recipe: unknown name 'bf17'; did you mean 'bf16'?"),
        (
            (model, other, "--input", lines),
            "cannot be compared: they differ in hidden_size (64 and 32)",
        ),
        (
            (model, "--input", lines, "--recipe", "jet-rl", "--precision.excluded", "layers.7.*"),
            "'layers.7.*' matches no linear",
        ),
        ((model, "--input", lines, "--json", tmp_path), f"{tmp_path}: is a directory; give a file"),
        ((model, "--input", tmp_path / "none.jsonl"), "none.jsonl: cannot be read"),
        ((tmp_path / "nothing",), "no such model directory"),
    )
    for words, said in cases:
        assert compare(*words) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, (words, error)


def test_names_are_put_together_by_layers():
    names = [f"layers.{i}.{name}" for i in range(4) for name in ("q_proj", "k_proj")] + [
        "layers.0.up_proj",
        "layers.2.up_proj",
    ]
    assert (
        grouped([*names, "layers.3.o_proj"], 4)
        == "q_proj, k_proj in all 4 layers; up_proj in layers 0, 2; o_proj in layer 3"
    )
    assert grouped([f"layers.{i}.q_proj" for i in (0, 1, 2, 5)], 9) == "q_proj in layers 0-2, 5"


def test_what_arrives_of_an_update_since_its_start(model, lines, tmp_path, capsys):
    """Weights moved by a tenth of a step of bfloat16, under two compute dtypes."""
    config, arrays = load_policy_arrays(model)
    on_grid = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    moved = {name: x.astype(np.float32) * np.float32(1 + 2**-12) for name, x in on_grid.items()}
    start = export_policy(tmp_path / "start", config, on_grid, "float32")
    now = export_policy(tmp_path / "now", config, moved, "float32")
    written = tmp_path / "compare.json"
    flags = ("--b.compute-dtype", "float32", "--input", lines, "--start", start, "--json", written)
    assert compare(now, *flags) == 0
    assert "update served by a" in capsys.readouterr().out
    narrow, whole = json.loads(written.read_text())["arrived"]
    assert narrow["all"] == {"changed": 0, "arrived": 0, "noise": 1, "cosine": None}
    assert whole["q_proj"] == {"changed": 1, "arrived": 1, "noise": 0, "cosine": pytest.approx(1)}
    assert set(whole) == {"all", "embed_tokens", "lm_head", "norm"} & set(whole) | {
        name.removeprefix("layers.").removesuffix(".weight") for name in arrays if "layers" in name
    }

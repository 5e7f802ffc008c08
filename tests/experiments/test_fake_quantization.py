"""The check against torch's fake quantization: its arithmetic, and what the committed record holds.
The peer itself needs torch, and runs in `make peers`."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from experiments import fake_quantization as study
from experiments.benchmarks.peer import SCRIPTS
from fp8rl_jax.config.recipe import RECIPES

RECORD = Path(study.__file__).parent / "results/fake_quantization.json"


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


def test_k3_of_known_ratios():
    exact, quantized = [np.log([0.5, 0.2]), np.log([0.1])], [np.log([0.25, 0.2]), np.log([0.2])]
    first, second = study.k3(exact, quantized)
    assert first == pytest.approx([2 - 1 - math.log(2), 0])
    assert second == pytest.approx([0.5 - 1 + math.log(2)])
    assert study.apart(exact, quantized)["largest"] == pytest.approx(math.log(2))


def test_an_estimate_is_over_tokens_and_its_interval_over_prompts():
    found = study.estimate([np.asarray([1.0, 2.0, 3.0]), np.asarray([6.0])])
    assert found["k3"] == 3.0 and found["median_token"] == 2.5 and found["by_prompt"] == [2.0, 6.0]
    # a resample has the first prompt alone, both, or the second alone
    assert found["interval"] == [2.0, 6.0]
    same = study.estimate([np.full(4, 0.25), np.full(2, 0.25), np.full(7, 0.25)])
    assert same["interval"] == [0.25, 0.25]


def test_codes_are_counted_by_their_values():
    every = np.arange(256, dtype=np.uint8)
    values = every.view(ml_dtypes.float8_e4m3fn).astype(float)
    kept = ~np.isnan(values)
    order = np.argsort(values[kept], kind="stable")
    assert (np.diff(study.steps(every[kept][order])) >= 0).all()
    counted = study.Agreement()
    codes, others = np.asarray([[0x00, 0x30]], np.uint8), np.asarray([[0x80, 0x33]], np.uint8)
    counted.add(codes, others, np.float32([[1.0]]), np.float32([[1.0]]))
    counted.add(codes, codes, np.float32([[2.0]]), np.float32([[1.0]]))
    assert counted == study.Agreement(4, 2, 3, 2, 1, 1.0)


def test_both_sides_are_told_the_same():
    tree = ast.parse((SCRIPTS / study.SCRIPT).read_text())
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(values["KINDS"]) == study.KINDS
    imported = [
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert {*imported} == {"numpy", "torch", "link", "transformers"}
    both, told = study.VARIANTS["both"].recipe(), study.VARIANTS["both"].for_peer(5)
    assert both.rollout == RECIPES["fp8-rollout"].rollout
    assert (told["weights"], told["activations"]) == ([128, 128], [1, 128])
    ends = study.VARIANTS["without the first and last two layers"]
    assert ends.for_peer(5)["layers"] == [2]
    assert (ends.recipe().first_layers_in_compute, ends.recipe().last_layers_in_compute) == (2, 2)
    assert not study.VARIANTS["weights alone"].recipe().rollout.activation.quantized
    assert study.VARIANTS["only down_proj"].recipe().quantized == ("*.down_proj",)
    assert [name for name, variant in study.VARIANTS.items() if variant.recipe() is None] == [
        "activations alone",
        "a scale per tensor",
    ]


def test_wrong_arguments():
    given = study.Arguments("python", "record.json")
    assert given.problems() == []
    for name, value in {"prompts": 0, "prompt_tokens": 0, "new_tokens": 1}.items():
        (problem,) = replace(given, **{name: value}).problems()
        assert name.replace("_", "-") in problem


def test_the_record_can_be_computed_again(record):
    """Means and intervals follow from the prompts' means and counts."""
    counts = record["completions"]["of_prompt"]
    assert sum(counts) == record["completions"]["tokens"] >= 700
    found = [
        of[side] for of in record["variants"].values() for side in ("torch", "ours") if side in of
    ]
    for of in (*found, record["rollout"], record["by_inverses"], record["decode, weights alone"]):
        again = study.weighted(of["by_prompt"], counts)
        assert again["k3"] == pytest.approx(of["k3"], rel=1e-3)
        assert again["interval"] == pytest.approx(of["interval"], rel=1e-2)


def test_what_the_record_says(record):
    """Torch and we agree as far as roundings let them: where nothing or weights alone are
    quantized to the digits, and over all tokens where activations are."""
    assert record["made"]["command"][:3] == ["python", "-m", "experiments.fake_quantization"]
    assert "/root" not in RECORD.read_text() and "/work" not in RECORD.read_text()
    assert record["peer"]["versions"]["torch"].startswith("2.13.0")
    assert record["variants"].keys() == study.VARIANTS.keys()
    assert record["unquantized"]["largest"] < 1e-3
    both, alone = record["variants"]["both"], record["variants"]["weights alone"]
    for of in record["variants"].values():
        if "ours" in of:
            (low, high), (least, most) = of["torch"]["interval"], of["ours"]["interval"]
            assert low < most and least < high
    assert alone["apart"]["k3"] < alone["torch"]["k3"] / 20
    # roundings alone take torch about as far from itself as we are from it
    assert 0.5 < both["apart"]["k3"] / record["by_inverses"]["apart"]["k3"] < 2
    for name, of in record["codes"].items():
        share = of["equal_codes"] / of["codes"]
        if name.endswith(", float32"):
            assert share > 0.999 and of["largest_step"] <= 1 and of["largest_scale_error"] < 2e-7
        else:
            assert share == 1 and of["equal_scales"] == of["scales"]


def test_errors_of_products_are_explained(record):
    """Those of normal numbers are the format's, and what a kind has beyond or below them is its
    cancellation: without it, errors are those of independent terms."""
    normal = record["gaussian"]
    found = [normal["median"]["activations"], normal["weights"], normal["median"]["product"]]
    assert found == pytest.approx([0.0257, 0.0264, 0.0369], abs=2e-4)
    assert record["errors"].keys() == record["accumulated"].keys() == {*study.KINDS}
    for of in record["errors"].values():
        middle = of["median"]
        assert middle["product"] == pytest.approx(middle["product_if_independent"], rel=0.05)
        assert middle["random_signs"] < 1.05 * normal["median"]["product"]


def test_tables(record):
    text = study.summary(record)
    lines = text.splitlines()
    for name in (*study.VARIANTS, *(f"`{kind}`" for kind in study.KINDS)):
        assert sum(line.startswith(f"| {name} |") for line in lines) == 1, name
    columns = {line.count("|") for line in lines if line}
    assert columns == {5, 9, 4}
    both = record["variants"]["both"]["torch"]
    assert f"| both | {both['k3']:.4f} ({both['interval'][0]:.4f} to " in text

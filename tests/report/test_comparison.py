"""Comparisons on the page: found, checked, drawn; beside runs and alone."""

import re

import pytest
from report.synthetic import LAYERS, write_comparison, write_run

from fp8rl_jax.cli import main as cli
from fp8rl_jax.errors import UserError
from fp8rl_jax.report.comparison import FAINTEST, panel, read_comparison
from fp8rl_jax.report.page import render, write_report
from fp8rl_jax.report.runs import find_comparisons, find_runs, group_runs, read_runs

TITLE = (
    "Rollout of the fp8-rollout recipe, float32 compute, against trainer of the fp8-rollout "
    "recipe, bfloat16 compute, exact"
)


def test_comparisons_are_found_beside_runs_and_alone(tmp_path):
    run, alone = write_run(tmp_path / "runs" / "bf16", "bf16", steps=5), tmp_path / "results"
    beside, inside = write_comparison(run), write_comparison(alone / "jet-rl")
    assert find_comparisons([tmp_path / "runs", alone]) == [beside, inside]
    assert find_runs([tmp_path / "runs", alone]) == [run] and find_runs([alone]) == []


def test_the_heat_map_has_a_cell_for_each_layer_and_operation(tmp_path):
    found = panel(0, read_comparison(write_comparison(tmp_path)))
    assert found.title == TITLE
    assert "k3 0.013, largest difference 0.25" in found.headline
    assert found.headline.endswith(
        "Recorded by another engine (<b>): k3 0.013 to side a and 0.031 to side b."
    )
    assert found.sets == [
        f"Only a quantizes {LAYERS} of {2 * LAYERS} linears: q_proj in all {LAYERS} layers."
    ]
    own, piled = (chart.svg for chart in found.charts)

    def cells(svg):
        """Opacities of the coloured rectangles, the key's nine left out."""
        return sorted(float(x) for x in re.findall(r"fill: var\(--arm0\); opacity: ([\d.]+)", svg))

    def opacity(power):
        return FAINTEST + (1 - FAINTEST) * (1 + power / 8)

    key = sorted(opacity(power) for power in range(-8, 0))
    assert len(cells(own)) == 2 * LAYERS + len(key)
    expected = sorted([opacity(-2), opacity(-7)] * LAYERS + key)
    assert cells(own) == pytest.approx(expected, abs=1e-5)
    # in of all layers but the first, q, attention and o of all; the log10 of 2e-2 is -1.699
    expected = sorted(
        [opacity(-2)] * (LAYERS - 1)
        + [opacity(-2)] * 2 * LAYERS
        + [opacity(-1.69897)] * LAYERS
        + key
    )
    assert cells(piled) == pytest.approx(expected, abs=1e-5)
    assert (
        len(re.findall(r">f</text>", own)) == LAYERS
        and len(re.findall(r">r</text>", own)) == LAYERS
    )


def test_the_page_with_and_without_runs(tmp_path):
    results = read_comparison(write_comparison(tmp_path / "results"))
    arms = group_runs(read_runs([write_run(tmp_path / "bf16", "bf16", steps=5)]), colours=6)
    for page in (render(arms, [results, results]), render([], [results, results])):
        assert "<b>float32" not in page and "&lt;b&gt;float32" in page and "<i>" not in page
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids)) and {
            "chart-compare-0-own",
            "chart-compare-1-output",
        } <= set(ids)
        assert "#0a0" not in page and "http:" not in page and "https:" not in page
        assert set(re.findall(r"var\((--[a-z]+\d*)\)", page)) <= set(
            re.findall(r"(--[a-z]+\d*):", page)
        )
    assert "Training" not in render([], [results]) and "Comparison:" in render(arms, [results])
    assert f"<title>{TITLE}" in render([], [results])


def test_the_command_draws_a_directory_of_comparisons(tmp_path, capsys):
    write_comparison(tmp_path / "jet-rl")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "Piled up" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-9], "not JSON"),
        (
            lambda text: text.replace('"key"', '"keys"'),
            "recorded.key is missing or of another kind",
        ),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "not written by this version's `fp8rl compare --json`",
        ),
        (lambda text: "[1]", "not written by this version's"),
        (
            lambda text: text.replace('"own"', '"mine"', 2),
            "layers[0].operations[0].own is no table",
        ),
        (
            lambda text: text.replace('"k3": 0.0125', '"k3": "high"'),
            "logprobs.k3 is missing or of another kind",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, said):
    path = write_comparison(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError) as fault:
        write_report([tmp_path], tmp_path / "report.html")
    assert (
        str(fault.value).startswith(f"{path}: ")
        and said in str(fault.value)
        and "\n" not in str(fault.value)
    )

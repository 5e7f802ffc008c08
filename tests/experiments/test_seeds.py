"""Paired seeds: the statistics against known values, the record of runs, and the figures that the
documents state."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from experiments import figures
from experiments.seeds import (
    STUDIES,
    detectable,
    main,
    mean_interval,
    summarize,
    table,
    write,
)
from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.run import RunConfig


def test_mean_interval_is_students_t():
    # Student's t with 4 degrees of freedom: 2.776445 at 97.5 %, 0.940965 at 80 %
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    error = np.sqrt(2.5 / 5)
    assert mean_interval(values) == pytest.approx(
        (3.0, 3 - 2.776445 * error, 3 + 2.776445 * error), rel=1e-6
    )
    assert detectable(values) == pytest.approx((2.776445 + 0.940965) * error, rel=1e-6)
    assert (
        mean_interval([7.0])[0] == 7.0
        and np.isnan(mean_interval([7.0])[1:]).all()
        and np.isnan(detectable([7.0]))
    )


def run(after: float, k3: float) -> dict:
    steps = {
        "k3": [k3, 3 * k3],
        "largest": [0.1, 0.2],
        "clipped": [0.0, 0.02],
        "reward": [0.1, 0.2],
    }
    return {
        "judged": None,
        "command": [],
        "commit": "c",
        "accuracy": [[0, 0.25], [2, after]],
        "problems": 100,
        "steps": steps,
    }


def test_differences_are_paired_by_seed():
    """Seeds vary by far more than arms do; a seed that the baseline lacks is not compared."""
    arms = {
        "bf16": {"0": run(0.2, 1e-9), "1": run(0.8, 1e-9), "2": run(0.5, 1e-9)},
        "fp8-rl": {
            "0": run(0.19, 1e-3),
            "1": run(0.78, 1e-3),
            "2": run(0.50, 1e-3),
            "7": run(0.9, 1e-3),
        },
    }
    summary = summarize(arms, "bf16")
    assert summary["bf16"]["difference"] is None
    found = summary["fp8-rl"]
    assert found["difference"][0] == pytest.approx(-0.01) and found["seeds"] == 4
    assert found["detectable"] < 0.05 < summary["bf16"]["after"][2] - summary["bf16"]["after"][0]
    assert found["k3"][0] == pytest.approx(2e-3) and found["clipped"] == pytest.approx(0.01)
    text = table(STUDIES["demo"], summary)
    assert "| `fp8-rl` | 4 |" in text and "-0.010 (" in text


def test_a_study_is_read_from_its_runs(tmp_path):
    """Whole runs only, from what a run leaves behind."""
    for arm, seed, whole in (("bf16", 0, True), ("fp8-rl", 0, True), ("bf16", 1, False)):
        directory = tmp_path / "runs" / f"{arm}-seed{seed}"
        (directory / ("model" if whole else "checkpoints")).mkdir(parents=True)
        rows = [
            {
                "step": 0,
                "eval/accuracy": 0.25,
                "eval/problems": 40.0,
                "mismatch/k3": 1e-4,
                "mismatch/logprob_abs_diff_max": 0.1,
                "mismatch/is_clip_frac": 0.0,
                "reward/mean": 0.5,
            },
            {"step": 1, "eval/accuracy": 0.5, "eval/problems": 40.0},
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / "run.json").write_text(
            json.dumps({"command": ["/somewhere/fp8rl", "train"], "commit": "abc"})
        )
    write("demo", tmp_path / "runs", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert set(record["runs"]) == {"bf16", "fp8-rl"} and set(record["runs"]["bf16"]) == {"0"}
    assert (
        record["runs"]["fp8-rl"]["0"]["commit"] == "abc"
        and record["runs"]["fp8-rl"]["0"]["problems"] == 40
    )
    assert record["summary"]["fp8-rl"]["difference"][0] == 0.0
    assert (tmp_path / "out" / "demo.svg").exists() and "| `fp8-rl` | 1 |" in (
        tmp_path / "out" / "demo.md"
    ).read_text()


@pytest.mark.parametrize("name", STUDIES)
def test_the_flags_of_a_study_are_keys_of_a_run(name):
    study = STUDIES[name]
    for flags in study.arms.values():
        config = load_config(RunConfig, [*study.files, *study.flags, *flags], "fp8rl train")
        assert config.resolved_recipe().name == config.recipe


def test_an_unknown_study_or_arm_is_named(capsys):
    assert main(["--study", "demos"]) == 2 and main(["--study", "demo", "--arms", "fp8"]) == 2
    told = capsys.readouterr().err
    assert (
        "'demos' unknown (known: demo, " in told and "'fp8' unknown (known: bf16, fp8-rl)" in told
    )


def test_the_documents_state_what_the_records_hold():
    page = (figures.ROOT / "README.md").read_text()
    assert page == figures.filled(page, figures.readme()), "run: python -m experiments.figures"
    assert (figures.ROOT / "docs" / "results.md").read_text() == figures.results(), (
        "run: python -m experiments.figures"
    )


def test_a_section_stands_where_its_record_does(tmp_path, monkeypatch):
    """SmolLM2's record, in the form of the demo's."""
    missing = "smollm2_addition"
    for path in figures.RESULTS.rglob("*"):
        if path.is_file() and not (path.parent.name == "seeds" and path.stem == missing):
            link = tmp_path / path.relative_to(figures.RESULTS)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "SmolLM2 addition" not in figures.results() and missing not in figures.readme()
    runs = {
        "bf16": {"0": run(0.40, 1e-12), "1": run(0.44, 1e-12), "2": run(0.42, 1e-12)},
        "fp8-rl": {"0": run(0.38, 1e-3), "1": run(0.44, 2e-3), "2": run(0.41, 3e-3)},
    }
    written = {"question": "?", "made": {}, "summary": summarize(runs, "bf16"), "runs": runs}
    assert written.keys() == figures.record("seeds/demo.json").keys()
    (tmp_path / "seeds" / f"{missing}.json").write_text(json.dumps(written))
    section = figures.results().split("## SmolLM2 addition\n", 1)[1].split("\n## ", 1)[0]
    assert "2 steps of GRPO, 3 paired seeds, 100 held-out problems" in section
    assert (
        "| `bf16` | 0.250 (0.250 to 0.250) | 0.420 (0.370 to 0.470) | baseline | 2.0e-12" in section
    )
    assert (
        "| `fp8-rl` | 0.250 (0.250 to 0.250) | 0.410 (0.335 to 0.485) | -0.010 (-0.035 to "
        "+0.015); sees 0.031 |" in section
    )
    assert f"Command: `python -m experiments.seeds --study {missing}`" in section
    (row,) = (line for line in figures.readme().splitlines() if "SmolLM2-135M learns sums" in line)
    assert "-0.010 (-0.035 to +0.015); sees 0.031 | 3 seeds |" in row


def test_no_measured_figure_stands_elsewhere_in_the_readme():
    """Decimals and powers of ten outside of code, links, papers' and versions' numbers come from a
    record or not at all."""
    before, rest = (figures.ROOT / "README.md").read_text().split(figures.START)
    prose = before + rest.split(figures.END)[1]
    numbers = r"arXiv[ :]*[\d.]+|\(?\d{4}\.\d{5}\)?|Python 3\.\d+|Apache-2\.0"
    prose = re.sub(rf"`[^`]*`|\]\([^)]*\)|^    .*$|{numbers}", "", prose, flags=re.M)
    assert re.findall(r"\d+\.\d+(?:e-?\d+)?|\d+e-\d+", prose) == []

"""The figures that the documents state: of the committed records, and of these alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import figures
from fp8rl_jax.ablation.design import read_design

RECORDS = sorted((figures.RESULTS / "ablations").glob("*.json"))


@pytest.fixture
def fresh():
    """Records are read anew."""
    figures.study.cache_clear()
    yield
    figures.study.cache_clear()


def test_the_documents_state_what_the_records_hold():
    page = (figures.ROOT / "README.md").read_text()
    assert page == figures.filled(page, figures.readme()), "run: python -m experiments.figures"
    assert (figures.ROOT / "docs" / "results.md").read_text() == figures.results(), (
        "run: python -m experiments.figures"
    )
    page = (figures.ROOT / "docs" / "formats.md").read_text()
    assert page == figures.filled(page, figures.formats()), "run: python -m experiments.figures"
    page = (figures.ROOT / "docs" / "training.md").read_text()
    assert page == figures.training(page), "run: python -m experiments.figures"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_of_its_file(path, monkeypatch):
    monkeypatch.chdir(figures.ROOT)
    record = json.loads(path.read_text())
    design = read_design(f"experiments/ablations/{path.stem}.toml")
    assert [arm["name"] for arm in record["arms"]] == [arm.name for arm in design.arms]
    assert record["seeds"] == list(design.seeds) and record["alpha"] == design.file.alpha
    assert record["metric"] == vars(design.file.metric) and record["judge"] == design.file.judge
    for arm, planned in zip(record["arms"], design.arms, strict=True):
        assert planned.settings.items() <= arm["settings"].items()
        assert {run["status"] for run in arm["runs"]} <= {"finished", "collapsed"}
        # of one commit, or of several that behave alike
        assert "fingerprint" in record or len({run["commit"] for run in arm["runs"]}) == 1
    assert record["command"] == f"fp8rl ablate {design.source}"


def test_an_arm_is_summed_up_over_seeds_and_steps(tmp_path, monkeypatch, fresh):
    def run(after: float, k3: float) -> dict:
        series = {
            "eval/accuracy": [0.25, after],
            "mismatch/k3": [k3, 3 * k3],
            "mismatch/logprob_abs_diff_max": [0.1, 10 * k3],
            "mismatch/is_clip_frac": [0.0, 0.02],
        }
        return {
            "outcome": after,
            "judged": {"judged/accuracy": after + 0.1},
            "by_problem": {"correct": [1] * 100},
            "series": {name: {"steps": [0, 1], "values": of} for name, of in series.items()},
        }

    comparison = {
        "arm": "b",
        "alpha": 0.025,
        "difference": {"mean": -0.01, "low": -0.03, "high": 0.01, "n": 2},
        "sentence": "b - a: -0.010 (97.5 %: -0.030, 0.010), 2 seeds: no worse within 0.05",
    }
    record = {
        "seeds": [0, 1],
        "metric": {"margin": 0.05},
        "arms": [
            {"name": "a", "runs": [run(0.4, 0.0), run(0.6, 0.0)]},
            {"name": "b", "runs": [run(0.4, 0.1), run(0.6, 0.3)]},
        ],
        "comparisons": [comparison],
    }
    (tmp_path / "ablations").mkdir()
    (tmp_path / "ablations" / "made_up.json").write_text(json.dumps(record))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    found = figures.study("made_up")
    assert (found.seeds, found.problems, found.steps) == (2, 100, 2)
    arm = found.arms["b"]
    assert arm.k3 == pytest.approx((0.4, 0.2, 0.6)) and arm.k3_median == pytest.approx(0.3)
    assert (arm.largest, arm.clipped) == pytest.approx((3.0, 0.01))
    assert (arm.before.mean, arm.after.mean, arm.judged.mean) == pytest.approx((0.25, 0.5, 0.6))
    assert figures.against(found.arms["a"]) == "baseline"
    assert figures.against(arm) == "-0.010 (97.5 %: -0.030 to +0.010): no worse within 0.05"


def test_a_section_stands_where_its_record_does(tmp_path, monkeypatch, fresh):
    """SmolLM2's record, in the form of the demo's."""
    missing = "smollm2_addition"
    for path in figures.RESULTS.rglob("*"):
        if path.is_file() and path.stem != missing:
            link = tmp_path / path.relative_to(figures.RESULTS)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "## SmolLM2 addition\n" not in figures.results() and missing not in figures.readme()
    Path(tmp_path / "ablations" / f"{missing}.json").symlink_to(
        figures.ROOT / "experiments/results/ablations/demo.json"
    )
    section = figures.results().split("## SmolLM2 addition\n", 1)[1].split("\n## ", 1)[0]
    assert "20 steps of GRPO, 5 paired seeds, 1024 held-out problems" in section
    assert f"Command: `fp8rl ablate experiments/ablations/{missing}.toml`" in section
    (row,) = (line for line in figures.readme().splitlines() if "SmolLM2-135M learns sums" in line)
    assert "5 seeds x 1024 problems |" in row


def test_corrections_at_a_high_dose_say_what_was_left_out(tmp_path, monkeypatch, fresh):
    """The record, with other updates taken back and other outcomes."""
    kept = figures.record("ablations/high_dose.json")
    for arm in kept["arms"]:
        for run in arm["runs"]:
            run["series"].pop("optim/rejected", None)
            run["outcome"] = 0.5 + 0.25 * (arm["name"] == "token_tis")
    for run, values in zip(kept["arms"][2]["runs"][:2], ([0.0, 1.0], [1.0, 1.0]), strict=True):
        run["series"]["optim/rejected"] = {"steps": [0, 1], "values": values}
    (tmp_path / "ablations").mkdir()
    (tmp_path / "ablations" / "high_dose.json").write_text(json.dumps(kept))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    text = figures.high_dose()
    rows = [line.split(" | ") for line in text.splitlines() if "`" in line[:3]]
    assert [row[-1].strip(" |") for row in rows] == ["", "", "75.0%", "", "", "", "", ""]
    assert "`token_tis` +0.250 (+0.250 to +0.250), ahead in 5 of 5 seeds" in text
    assert "`icepop` +0.000 (+0.000 to +0.000), ahead in 0 of 5 seeds" in text


def test_the_speed_of_the_rollout_is_its_record(tmp_path, monkeypatch):
    def ratio(over: str, under: str, median: float, part: str = "seconds") -> dict:
        spread = {"median": median, "q1": median, "q3": 2 * median}
        return {"over": over, "under": under, "part": part} | spread

    paged, static = "fp8rl_jax/paged/bf16", "fp8rl_jax/static/bf16"
    ratios = [ratio(paged, static, 0.25), ratio("vllm", paged, 1.5), ratio("vllm", static, 0.5)]
    shape = {"prompts": 8, "samples": 1, "new_tokens": 40}
    grpo = [ratio("tunix", "fp8rl_jax/bf16", 1.25), ratio("tunix", "fp8rl_jax/bf16", 2.0, "train")]
    model = {"name": "SmolLM2", "compute_dtype": "float32"}
    engines = {
        paged: {"rows": 8, "tried": {}},
        static: {"rows": 4, "tried": {"2": 9.0, "4": 7.0}},
    }
    made_up = {
        "machine": {"threads": 2, "processor": "Abacus"},
        "rounds": 3,
        "commit": "0123456789",
        "complete": False,
        "benchmarks": [
            {
                "benchmark": "generation",
                "workload": model,
                "shape": shape,
                "ratios": ratios[1:],
                "raw": {},
            },
            {
                "benchmark": "grpo_step",
                "workload": model,
                "shape": shape | {"samples": 3},
                "ratios": grpo,
                "peak_bytes": {
                    "tunix": {"median": 3 * 2**30},
                    "fp8rl_jax/bf16": {"median": 2**31},
                },
                "raw": {},
            },
            {
                "benchmark": "uneven_generation",
                "workload": model,
                "shape": shape | {"median": 2},
                "ratios": ratios,
                "raw": {"engines": engines},
            },
        ],
    }
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / figures.ROLLOUT).write_text(json.dumps(made_up))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    text = figures.rollout(figures.ROLLOUT)
    assert "2 cores (Abacus), at 0123456, 3 rounds" in text
    assert "ended before its last benchmark" in text
    assert "`static/bf16` has batches of 4 rows, the fastest of 2, 4." in text
    assert text.count("| 8 completions, 40 tokens each |") == 2
    row = "| 8 completions, 2 tokens in the median, 40 at most |"
    assert f"{row} `static/bf16` | `paged/bf16` | 0.25 (0.25 to 0.50) |" in text
    row = "| GRPO, the rest: 24 completions, 40 tokens each |"
    assert f"{row} `bf16` | `tunix` | 2.00 (2.00 to 4.00) |" in text
    found, _ = figures.stepped()
    assert "the step 1.25 (1.25 to 2.50); the rest 2.00 (2.00 to 4.00)" in found
    assert found.endswith("peak memory of the process 2.0 GiB, tunix's 3.0")
    found, over = figures.beside()
    assert over == "3 rounds (quartiles)"
    assert found.endswith("; `paged/bf16` 1.50 (1.50 to 3.00) at different lengths")


def test_growth_with_depth_is_its_record(tmp_path, monkeypatch):
    """Means beside medians, of SmolLM2 in bfloat16 alone."""

    def point(depth: int, dtype: str, total: list[float]) -> dict:
        parts = dict.fromkeys(("formats", "cache", "order", "total"), total)
        of = parts | {"tokens": 48, "share": 0.25, "largest": 1.0}
        return {
            "weights": "smollm2",
            "depth": depth,
            "dtype": dtype,
            "k3": {"bf16": of, "fp8-rl": of},
        }

    points = [
        point(8, "bfloat16", [1e-3, 2e-3, 9e-3]),
        point(2, "bfloat16", [1e-4, 1e-4, 4e-4]),
        point(16, "float32", [1.0, 1.0, 1.0]),
    ]
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "results.json").write_text(json.dumps({"points": points}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    found, over = figures.growth()
    grown = "2.0e-04 to 4.0e-03 (1.0e-03 to 9.0e-03), in the median 1.0e-04 to 2.0e-03"
    assert found == f"k3 from 2 to 8 layers: `fp8-rl` {grown}; `bf16` {grown}"
    assert over == "3 sets of prompts (bootstrap)"
    text = figures.depth()
    assert "48 tokens of 3 sets of prompts, sampled by the recipe's own rollout" in text
    assert "| `fp8-rl` | 2.0e-04 / 1.0e-04 | 4.0e-03 (1.0e-03 to 9.0e-03) / 2.0e-03 |" in text


def test_no_measured_figure_stands_elsewhere_in_the_readme():
    """Decimals and powers of ten outside of code, links, papers' and versions' numbers come from a
    record or not at all."""
    before, rest = (figures.ROOT / "README.md").read_text().split(figures.START)
    prose = before + rest.split(figures.END)[1]
    numbers = r"arXiv[ :]*[\d.]+|\(?\d{4}\.\d{5}\)?|Python 3\.\d+|Apache-2\.0"
    prose = re.sub(rf"`[^`]*`|\]\([^)]*\)|^    .*$|{numbers}", "", prose, flags=re.M)
    assert re.findall(r"\d+\.\d+(?:e-?\d+)?|\d+e-\d+", prose) == []


def test_steps_to_a_reward_are_of_the_runs_that_come_to_it():
    """By the mean of three in a row, so that one lucky step is none."""

    def run(*rewards: float) -> dict:
        return {"series": {"reward/mean": {"values": list(rewards)}}}

    lucky, sooner, later = run(0, 1, 0, 0), run(0, 0.5, 0.5, 0.5), run(0, 0, 0.3, 0.3, 0.9)
    assert figures.steps_to(0.5, [sooner, later]) == "4.5 (4.0 to 5.0)"
    assert figures.steps_to(0.5, [lucky, sooner]) == "4.0, 1 of 2 runs"
    assert figures.steps_to(0.5, [lucky]) == "none"

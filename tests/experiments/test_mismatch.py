"""The mismatch study without its runs: intervals, verdicts, the record, and what it asks of `fp8rl`."""

from __future__ import annotations

import json
import os
from xml.etree import ElementTree

import numpy as np
import pytest

from experiments.mismatch import runs as study
from experiments.mismatch.__main__ import main
from experiments.mismatch.bootstrap import BLOCK, draws, interval, means
from experiments.mismatch.plots import draw_learning, draw_mismatch
from experiments.mismatch.record import Record
from experiments.mismatch.runs import DIGITS, EVALUATION, Place, settings
from experiments.mismatch.summary import check, summarize, table
from experiments.mismatch.variants import CLAIMS, KIND, ROOT, RUN_FILES, VARIANTS, Claim
from fp8rl_jax.cli.load import dump_toml, load_config
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError

STEPS = 100


def made(k3, seeds=(0, 1), steps=STEPS, seed=0):
    """Runs with log-normal k3 around a level."""
    rng = np.random.default_rng(seed)
    parts = {}
    for number in seeds:
        series = {key: rng.uniform(0.2, 0.8, steps).tolist() for key in DIGITS}
        series["mismatch/k3"] = (k3 * rng.lognormal(0, 0.3, steps)).tolist()
        series["mismatch/logprob_abs_diff_max"] = [k3] * steps
        accuracy = {key: [0.5, 0.75] for key in EVALUATION}
        parts[str(number)] = {"commit": "c", "start": "s", "evaluation": {"step": [0, steps], **accuracy}, "steps": series}
    return parts


def test_resampled_runs_are_blocks_of_their_own_seed():
    drawn = draws(3, 40)
    assert drawn.shape[1:] == (3, 40) and drawn.min() == 0 and drawn.max() == 39
    inside = np.diff(drawn, axis=2).reshape(len(drawn), 3, -1) % 40
    assert (np.delete(inside, np.arange(BLOCK - 1, 39, BLOCK), axis=2) == 1).all()
    seeds = np.arange(3.0)[:, None] * np.ones(40)
    assert interval(means(seeds)) == (1.0, 1.0)  # seeds are not resampled


def test_the_interval_is_that_of_a_mean_and_knows_of_dependence():
    """Of independent steps sigma / sqrt(n); of steps that repeat each other five times, sqrt(5) times as wide."""
    rng = np.random.default_rng(1)
    free = rng.normal(size=(4, 500))
    low, high = interval(means(free))
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(2000), rel=0.15)
    low, high = interval(means(np.repeat(rng.normal(size=(4, 100)), 5, axis=1)))
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(400), rel=0.25)


@pytest.mark.parametrize(("above", "verdict"), [(2e-3, "holds"), (5e-4, "fails"), (1e-3, "open")])
def test_an_order_holds_where_its_whole_interval_does(above, verdict):
    found = check(Claim("a", "b", "someone"), {"a": made(above, (0, 1, 5)), "b": made(1e-3, (1, 2, 5), seed=3)})
    assert found["verdict"] == verdict and found["ratio"] == pytest.approx(above / 1e-3, rel=0.1)
    assert found["interval"][0] < found["ratio"] < found["interval"][1]


def test_the_summary_is_ordered_and_keeps_what_is_zero():
    levels = {"bf16": 1e-6, "fp8-rollout": 1e-3, "fp8-e2e": 1e-5, "jet-rl-exact": 0.0}
    summary = summarize({name: made(level) for name, level in levels.items()})
    assert list(summary["variants"]) == ["fp8-rollout", "fp8-e2e", "bf16", "jet-rl-exact"]
    assert [claim["verdict"] for claim in summary["claims"]] == ["holds", "holds"]
    exact = summary["variants"]["jet-rl-exact"]
    assert exact["k3"]["interval"] == (0.0, 0.0) and exact["zero_steps"] == exact["steps"] == 2 * STEPS
    assert len(exact["k3"]["windows of 50 steps"]) == 2
    assert table(summary).count("\n| `") == 4


def test_charts_are_svg_and_name_every_variant(tmp_path):
    runs = {name: made(0.0 if name in KIND["exact"] else 10.0**-i) for i, name in enumerate(VARIANTS)}
    draw_mismatch(runs, summarize(runs), tmp_path / "mismatch.svg")
    draw_learning(runs, tmp_path / "learning.svg")
    for chart in ("mismatch", "learning"):
        text = " ".join(ElementTree.parse(tmp_path / f"{chart}.svg").getroot().itertext())
        assert all(name in text for name in VARIANTS)
    assert "0 at every step: bf16-exact, jet-rl-exact" in (tmp_path / "mismatch.svg").read_text()


def test_the_record_takes_runs_in_and_keeps_the_others(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results.json"
    record = Record(path)
    for variant, level in (("fp8-rollout", 1e-3), ("bf16", 1e-6)):
        for seed, run in made(level, (2, 10)).items():
            record.add(variant, int(seed), run)
    record.write()
    again = Record(path)
    again.add("bf16", 2, made(1e-5)["0"])
    again.add("jet-rl-exact", 0, made(0.0)["0"])
    again.write()
    found = json.loads(path.read_text())
    assert list(found["variants"]) == ["bf16", "fp8-rollout", "jet-rl-exact"]
    assert found["variants"]["bf16"]["flags"] == ["--recipe", "bf16"]
    assert list(found["variants"]["bf16"]["seeds"]) == ["2", "10"] and again.starts() == {"s"}
    assert found["variants"]["bf16"]["seeds"]["2"] == made(1e-5)["0"]
    assert found["variants"]["fp8-rollout"] == record.variants["fp8-rollout"]
    monkeypatch.setattr("experiments.mismatch.record.settings", lambda: settings() | {"optimizer.learning_rate": 1.0})
    with pytest.raises(UserError, match="another optimizer.learning_rate in the run files"):
        Record(path)


def run_directory(directory, steps=4, **changes):
    config = load_config(RunConfig, [*(str(ROOT / file) for file in RUN_FILES), "--trainer.steps", str(steps)], "x")
    directory.mkdir(parents=True)
    text = dump_toml(config)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (directory / "config.toml").write_text(text)
    (directory / "run.json").write_text('{"commit": "abc"}')
    rows = [{"step": i, **dict.fromkeys(DIGITS, 0.123456789 + i)} for i in range(steps)]
    rows[0] |= dict.fromkeys(EVALUATION, 0.5)
    rows.append({"step": steps, **dict.fromkeys(EVALUATION, 0.75)})
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Place("bf16", 0, directory)


def test_a_run_is_read_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "settings", lambda: settings() | {"trainer.steps": 4})
    place = run_directory(tmp_path / "whole")
    found = study.read(place, "start")
    assert found["commit"] == "abc" and found["start"] == "start" and found["evaluation"]["eval/accuracy"] == [0.5, 0.75]
    assert found["steps"]["mismatch/k3"] == [0.123457, 1.12346, 2.12346, 3.12346]
    assert found["steps"]["mismatch/pearson"][0] == 0.12345679
    lines = (place.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place.directory / "metrics.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(UserError, match="has 3 of 4 steps"):
        study.read(place, "start")
    other = run_directory(tmp_path / "other", **{"learning_rate = 3e-05": "learning_rate = 0.1"})
    with pytest.raises(UserError, match="was trained with optimizer.learning_rate = 0.1, the run files have 3e-05"):
        study.read(other, "start")


def test_only_what_is_missing_is_trained(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(study, "_fp8rl", lambda command, flags, threads: asked.append((command, flags)))
    place = Place("fp8-rl", 3, tmp_path / "run")
    flags = ["--recipe", "fp8-rl", "--seed", "3", "--output", os.path.relpath(place.directory, ROOT)]
    (place.directory / "checkpoints").mkdir(parents=True)
    study.train(place, 1)
    assert asked == [("train", flags)] and not place.directory.exists()  # it had died before its first checkpoint
    (place.directory / "checkpoints" / "50").mkdir(parents=True)
    study.train(place, 1)
    assert asked[1] == ("train", [*flags, "--resume"])
    (place.directory / "model").mkdir()
    study.train(place, 1)
    assert len(asked) == 2


def test_variants_are_runs_of_all_recipes():
    assert set(RECIPES) <= set(VARIANTS) == {name for names in KIND.values() for name in names}
    assert {name for claim in CLAIMS for name in (claim.above, claim.below)} <= set(RECIPES)
    files = [str(ROOT / file) for file in RUN_FILES]
    for name, flags in VARIANTS.items():
        config = load_config(RunConfig, [*files, *flags], "x")
        assert config.recipe == name.removesuffix("-exact") and bool(config.precision.exact) == (name in KIND["exact"])
    assert config.trainer.steps == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "bf17"], "--variants: bf17 unknown (known: bf16"),
        (["--threads", "0"], "--threads: 0 must be at least 1"),
        (["--variants", "--output", "/nowhere/at/all"], "has no runs; name some with --variants"),
    ],
)
def test_faults_are_one_line(capsys, words, message):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

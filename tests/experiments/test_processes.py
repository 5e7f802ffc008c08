"""One process and several: what is compared of two runs, and a process that fails."""

from __future__ import annotations

import json

import pytest

from experiments.processes import METRICS, Arguments, difference, train
from fp8rl_jax.errors import UserError


def test_the_largest_difference_of_any_row(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.5}, *({name: 2.0 for name in METRICS} for _ in range(2))]
    for name, loss in (("one", 2.0), ("other", 1.5)):
        (tmp_path / name).mkdir()
        rows[2]["loss"] = loss
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / name / "metrics.jsonl").write_text(text)
        (tmp_path / name / "samples.jsonl").write_text(f"alike\n{name}")
    found = difference(tmp_path / "one", tmp_path / "other")
    assert found["largest"] == {name: 0.25 * (name == "loss") for name in METRICS}
    assert (found["samples"], found["alike"]) == (2, 1)
    del rows[2]["loss"]
    (tmp_path / "other" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(KeyError):
        difference(tmp_path / "one", tmp_path / "other")


def test_what_failed_is_said():
    with pytest.raises(UserError, match=r"status 2 of: fp8rl train no\.toml: .*no\.toml"):
        train(["train", "no.toml"], 1)
    assert Arguments(cases=("all",)).problems()

"""A rollout on devices of its own, in step with the trainer and one step ahead of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parallel.helpers import run_on_devices, run_processes
from tiny_run import LEARNS, measured, train, write_run

RUN = {
    "recipe": "fp8-e2e-kv",
    "precision": {"kv_calibration": "rollout"},
    "rollout": {"top_k": 64},
    "rl": {"correction": {"method": "token_tis", "truncated_sampling": "replay"}},
    "trainer": {"steps": 4},
    "checkpoint": {"every": 2},
}


@pytest.mark.slow
def test_it_samples_beside_the_trainer_and_ahead_of_it(tmp_path):
    """In step: the first tokens are those of one device, and every step is sampled by the trainer's
    policy. Ahead: bit for bit what the same updates give one after the other, and where the run
    goes on from its checkpoint. In two processes the first two steps, which the first weights
    sample, have the same tokens."""
    run_file, folder = write_run(tmp_path, LEARNS, RUN), Path(__file__).parent
    expected = run_on_devices(folder / "apart_run.py", 4, run_file, str(tmp_path), timeout=400)
    assert train(run_file, tmp_path / "alone", "--trainer.steps", "1") == 0

    sampled = (tmp_path / "alone/samples.jsonl").read_text()
    assert (tmp_path / "apart/samples.jsonl").read_text().startswith(sampled)
    first, *later = measured(tmp_path / "apart")
    for name, value in measured(tmp_path / "alone")[0].items():
        if name in ("reward/mean", "entropy", "policy_loss", "optim/grad_norm", "sync/arrived"):
            assert first[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert max(row["mismatch/k3"] for row in (first, *later)) < 1e-4
    assert [row["rollout/weight_version"] for row in later] == [2, 3, 4]

    ahead = measured(tmp_path / "ahead")
    assert [row["rollout/weight_version"] for row in ahead] == [1, 1, 2, 3]
    assert "mismatch/k3" in ahead[0] and min(row["off_policy/k3"] for row in ahead[1:]) > 1e-4
    for found, row in zip(ahead, expected["rows"], strict=True):
        assert {x for x in row.items() if not x[0].startswith("perf/")} <= set(found.items())
    assert measured(tmp_path / "resumed") == ahead
    for file in ("samples.jsonl", "model/model.safetensors"):
        assert (tmp_path / "resumed" / file).read_bytes() == (
            tmp_path / "ahead" / file
        ).read_bytes()

    given = "--trainer.steps", "3", *expected["flags"]
    run_processes(folder / "train_run.py", 2, 2, run_file, str(tmp_path / "two"), *given)
    rows = measured(tmp_path / "two")
    assert [row["rollout/weight_version"] for row in rows] == [1, 1, 2]
    for row, other in zip(rows[:2], ahead[:2], strict=True):
        for name in ("reward/mean", "entropy", "policy_loss", "optim/grad_norm", "sync/arrived"):
            assert row[name] == pytest.approx(other[name], rel=1e-2, abs=1e-5), name
    texts = [
        [row for row in map(json.loads, lines) if row["step"] < 2]
        for lines in ((tmp_path / run / "samples.jsonl").open() for run in ("two", "ahead"))
    ]
    assert texts[0] == texts[1] and texts[0]

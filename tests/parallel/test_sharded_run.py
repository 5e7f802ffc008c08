"""A whole run, sampler and update compiled with shardings, on 8 devices against one."""

from pathlib import Path

import pytest
from parallel.helpers import run_processes
from tiny_run import metric_rows, write_run


@pytest.mark.slow
def test_mesh_of_eight_trains_the_same_curve(tmp_path):
    run_file = write_run(tmp_path, {"trainer": {"steps": 2}})
    script = Path(__file__).with_name("train_run.py")
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    flags = ["--recipe", "fp8-rl"]
    run_processes(script, 1, 1, run_file, tmp_path / "one", *flags, timeout=240)
    run_processes(script, 1, 8, run_file, tmp_path / "eight", *flags, *mesh, timeout=240)
    for a, b in zip(metric_rows(tmp_path / "one"), metric_rows(tmp_path / "eight"), strict=True):
        for name in ("reward/mean", "completions/mean_length", "entropy", "optim/grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=1e-4), name
        assert b["mismatch/k3"] < 1e-2

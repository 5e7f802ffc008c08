"""A packed run in two processes against a padded one in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import metric_rows, run_processes
from parallel.test_joined_run import RUN, measured

FLAGS = ("--trainer.steps", "2", "--evaluation.every", "0", "--mesh.data", "2", "--mesh.fsdp", "2", "--optimizer.eps", "1e-4")
PACKING = ("--trainer.packing", "--trainer.pack-tokens", "40")


@pytest.mark.slow
def test_two_processes_pack_the_same_rows(tmp_path):
    """Rows of a packing divide over the batch axes of the mesh, and both processes make the same."""
    script, run_file = Path(__file__).with_name("train_run.py"), tmp_path / "run.toml"
    run_file.write_text(RUN.replace("max_prompt_tokens = 6", "max_prompt_tokens = 20"))
    run_processes(script, 1, 4, run_file, tmp_path / "padded", *FLAGS, timeout=600)
    run_processes(script, 2, 2, run_file, tmp_path / "packed", *FLAGS, *PACKING, timeout=600)
    for found, expected in zip(metric_rows(tmp_path / "packed"), metric_rows(tmp_path / "padded"), strict=True):
        assert found["perf/padding_fraction"] < expected["perf/padding_fraction"]
        assert measured(found) == pytest.approx(measured(expected), rel=1e-4, abs=1e-6)

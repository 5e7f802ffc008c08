"""A packed run in two processes against a padded one in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import run_processes
from tiny_run import LEARNS, column, measured, write_run

FLAGS = ("--trainer.steps", "2", "--mesh.data", "2", "--mesh.fsdp", "2", "--optimizer.eps", "1e-4")
PACKING = ("--trainer.packing", "--trainer.pack-tokens", "40")


@pytest.mark.slow
def test_two_processes_pack_the_same_rows(tmp_path):
    """Rows of a packing divide over the batch axes of the mesh, and both processes make the
    same."""
    script = Path(__file__).with_name("train_run.py")
    run_file = write_run(tmp_path, LEARNS, {"rollout": {"max_prompt_tokens": 20}})
    run_processes(script, 1, 4, run_file, tmp_path / "padded", *FLAGS, timeout=600)
    run_processes(script, 2, 2, run_file, tmp_path / "packed", *FLAGS, *PACKING, timeout=600)
    padding = [column(tmp_path / name, "perf/padding_fraction") for name in ("packed", "padded")]
    assert all(padding[0] < padding[1])
    for found, expected in zip(
        measured(tmp_path / "packed"), measured(tmp_path / "padded"), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)

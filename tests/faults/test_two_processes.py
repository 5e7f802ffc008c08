"""Signals to a run of two processes: both agree where they stop, and go on to the same bits."""

from __future__ import annotations

import signal
import time

import pytest
from tiny_run import LEARNS, write_run

from experiments.chaos.supervised import Started, left

FLAGS = ("--mesh.data", "1", "--mesh.fsdp", "2", "--trainer.steps", "10", "--resume")


@pytest.mark.slow
def test_a_signal_to_one_or_both_is_a_checkpoint_of_both(tmp_path, fault):
    run_file = write_run(tmp_path, LEARNS)

    def start(name: str) -> Started:
        output = tmp_path / name
        # one log name: programs are compiled once for all
        return Started(["train", run_file, "--output", str(output), *FLAGS], tmp_path / "run", 2)

    whole, before = start("whole"), 0
    assert whole.wait() == [0, 0], whole.said()
    for asked, at in (([1], 3), ([0, 1], 6)):
        run = start("run")
        run.until(lambda run=run, at=at: run.told[0].where[0] >= at)
        began = time.monotonic()
        for process in asked:
            run.processes[process].send_signal(signal.SIGTERM)
        assert run.wait(60) == [75, 75], run.said() + run.said(1)
        detected, last = time.monotonic() - began, []
        for process in (0, 1):
            line = run.said(process).splitlines()[-1]
            why = "SIGTERM" if process in asked else "another process was asked to stop"
            assert line.startswith(f"fp8rl: {why}: stopped before step "), line
            last.append(line.partition(" stopped before ")[2])
        step = int(last[0].removeprefix("step ").partition(";")[0])
        assert last == [f"step {step}; --resume goes on from the checkpoint of step {step}"] * 2
        assert step >= at and (tmp_path / f"run/checkpoints/{step}").is_dir() and step > before
        before = step
        fault(
            "signal to both" if 0 in asked else "signal to one",
            run.said().splitlines()[-1],
            status=75,
            detected=detected,
        )
    resumed = start("run")
    assert resumed.wait() == [0, 0], resumed.said()
    assert f"resuming at step {before} " in resumed.said()
    assert left(tmp_path / "run") == left(tmp_path / "whole")

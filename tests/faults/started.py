"""Runs in processes of their own, which can be killed: started, waited for, and what they said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.chaos.supervised import QUICK

ROOT = Path(__file__).parents[2]


@dataclass
class Started:
    """A `fp8rl train` that runs."""

    process: subprocess.Popen
    output: Path
    errors: Path
    began: float

    def wait_for(self, happened: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until something has happened, or fail where the process ends or time is up."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def end(self, seconds: float = 120) -> int:
        """Wait for the end; gives the exit status, and fails with what was said where that is a
        fault of the program itself."""
        status = self.process.wait(seconds)
        assert status != 1, self.said
        return status

    @property
    def said(self) -> str:
        """Standard error so far."""
        return self.errors.read_text()

    def rows(self) -> int:
        """Lines of the record so far."""
        return len(whole_lines(self.output / "metrics.jsonl"))

    def caught_up(self, rows: int) -> tuple[float, int]:
        """Wait until it has all `rows` again that were there before, and one more.

        Returns:
            Seconds since its start, and rows that it did again.
        """
        resumed = re.compile(r"(?:resuming|starting) at step (\d+)")
        self.wait_for(lambda: bool(resumed.search(self.said)) and self.rows() > rows)
        seconds, found = time.monotonic() - self.began, resumed.search(self.said)
        assert found is not None
        return seconds, max(rows - int(found[1]), 0)


def start(run_file: str, output: Path, *flags: str) -> Started:
    """Start `fp8rl train` on one device."""
    environ = os.environ | {
        "XLA_FLAGS": QUICK,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    errors = output.with_name(f"{output.name}-{time.monotonic_ns()}.err")
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8rl_jax.cli.main", "train", run_file, "--output", output]
            + list(flags),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    return Started(process, output, errors, began)


def whole_lines(path: Path) -> list[dict]:
    """The rows of a file of JSON lines that are whole; none where there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

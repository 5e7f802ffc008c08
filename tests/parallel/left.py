"""Run by test_left_behind.py in two processes, of which the last ends while the others wait for it
in a collective."""

from __future__ import annotations

import os
import signal
import sys

import jax
import numpy as np

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.parallel import initialize, leave_on_failure, sum_over_processes


def main(coordinator: str, num_processes: int, process_id: int, end: str) -> None:
    initialize(
        MeshConfig(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
    )
    with leave_on_failure():
        assert sum_over_processes(np.ones(1)) == jax.process_count()
        if process_id == num_processes - 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault that the others do not know of")
        sum_over_processes(np.ones(1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

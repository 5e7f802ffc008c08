"""Run by test_left_behind.py in two or three processes, of which one ends, stops or hangs while the
others wait for it in a collective.

Arguments: coordinator, number of processes, number of this one, which one ends, and how.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import numpy as np

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import Interrupted, UserError, for_the_command_line
from fp8rl_jax.parallel import PROGRESS, initialize, leave_on_failure, sum_over_processes

BROKEN = "Gloo AllReduce failed: Connection closed by peer"


def ends(how: str) -> None:
    print(f"at {time.time()}", file=sys.stderr, flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hangs":
        time.sleep(600)
    if how == "slow":
        with PROGRESS.taking(30):
            time.sleep(6)
    if how == "refuses":
        raise UserError("model.path: no such model")
    if how == "breaks":  # what a collective raises, of a connection of its own
        raise ValueError(BROKEN)


def main(coordinator: str, num_processes: int, process_id: int, which: int, how: str) -> None:
    config = MeshConfig(
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        lost_after_seconds=3,
        hung_after_seconds=4,
    )
    initialize(config)
    with leave_on_failure():
        assert sum_over_processes(np.ones(1)) == jax.process_count()
        PROGRESS.begin(12)
        with PROGRESS.enter("gen"):
            time.sleep(1)
            if process_id == which:
                ends(how)
            sum_over_processes(np.ones(1))


if __name__ == "__main__":
    try:
        with for_the_command_line():
            main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
    except UserError as error:
        print(f"fp8rl: error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as end:
        print(f"fp8rl: {end}", file=sys.stderr)
        sys.exit(75)

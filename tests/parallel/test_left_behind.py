"""A process that ends, or never comes, must not leave the others waiting without a word."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from parallel.helpers import ROOT, exit_codes


@pytest.mark.parametrize(("end", "code"), [("killed", -9), ("failed", 1)])
def test_no_process_waits_for_one_that_ended(end, code):
    started = time.monotonic()
    survivor, ended = exit_codes(Path(__file__).with_name("left.py"), 2, 1, end, timeout=90)
    assert ended == code
    assert survivor == 75  # None: it still waited when time was up
    # what jax's own exit would take: 100 s to miss a killed process, 300 s to give up on one that
    # failed
    assert time.monotonic() - started < 60


def joining(port: int, process: int) -> subprocess.Popen:
    """A process of two that joins the other, and does nothing else."""
    program = f"""
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import initialize
try:
    initialize(MeshConfig(coordinator="127.0.0.1:{port}", num_processes=2, process_id={process}))
except UserError as error:
    raise SystemExit(f"refused: {{error}}")
"""
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("process", "other"), [(0, 1), (1, 0)])
def test_a_process_that_waits_says_for_whom_and_hears_ctrl_c(process, other):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    waiting = joining(port, process)
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    assert line == f"fp8rl: waiting for process {other} of 2 at 127.0.0.1:{port}\n"
    asked = time.monotonic()
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=20)
    assert waiting.returncode == 130 and said.splitlines()[-1] == "fp8rl: interrupted"
    assert time.monotonic() - asked < 3


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = joining(port, 0)
        _, said = refused.communicate(timeout=30)
    assert refused.returncode == 1 and said.splitlines()[-1].startswith("refused: mesh.coordinator")
    assert f"cannot listen on port {port}" in said

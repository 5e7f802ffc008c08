"""A process that ends, stops, hangs or never comes must not leave the others waiting without a
word: they name it, and end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from parallel.helpers import ROOT, endings, free_port

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.parallel.watch import PeerWatch, Progress

LOST = "fp8rl: process {} was lost in step 12 (gen: {}"
LOST_STEPS = "the steps since the last checkpoint"
OWN = "process {} ended by an error of its own in step 12: {}"


def ended(count: int, which: int, how: str) -> tuple[list[tuple[int | None, str]], float]:
    """Exit codes and the last line that each said, of ours if there is one: JAX may still log the
    loss while a process ends. Seconds from the fault to the end of the last."""
    script = Path(__file__).with_name("left.py")
    found = endings(script, count, 1, str(which), how, timeout=60)
    at = re.search(r"^at (.*)$", found[which][1], re.M)
    assert at is not None, found
    seconds = time.time() - float(at[1])
    lines = [(code, said.strip().splitlines() or [""]) for code, said in found]
    return [
        (code, ([x for x in said if x.startswith("fp8rl: ")] or said)[-1]) for code, said in lines
    ], seconds


@pytest.mark.parametrize(("count", "which"), [(3, 1), (2, 0)])
def test_a_killed_process_is_named_by_all_others(count, which, fault):
    found, seconds = ended(count, which, "killed")
    assert found.pop(which)[0] == -signal.SIGKILL
    for code, line in found:
        assert code == 75
        assert line == LOST.format(which, "its connection closed); continue with --resume")
    fault("peer killed", line, status=75, detected=seconds, lost=LOST_STEPS)


@pytest.mark.parametrize(
    ("which", "how", "why"),
    [
        (0, "stopped", "no word from it for 3 s"),
        (1, "hangs", "it has not moved for 4 s, and others wait for it"),
    ],
)
def test_a_process_that_stops_or_hangs_is_lost_within_the_bound(which, how, why, fault):
    found, seconds = ended(2, which, how)
    if how == "stopped":
        # as long as nobody continues or kills it
        assert found.pop(which)[0] is None
    for code, line in found:
        assert code == 75
        assert line.startswith(LOST.format(which, why))
    fault("peer stops", line, status=75, detected=seconds, lost=LOST_STEPS)


def test_what_takes_long_by_right_is_no_hang():
    assert [code for code, _ in ended(2, 1, "slow")[0]] == [0, 0]


@pytest.mark.parametrize(
    ("which", "how", "status", "why"),
    [
        (0, "refuses", 2, "model.path: no such model"),
        # its own connection: nobody was lost, and to start again would not help
        (1, "breaks", 1, "ValueError: Gloo AllReduce failed: Connection closed by peer"),
    ],
)
def test_a_process_with_an_error_of_its_own_is_no_lost_one(which, how, status, why, fault):
    found, seconds = ended(2, which, how)
    assert [code for code, _ in found] == [status, status]
    assert found[1 - which][1].endswith(OWN.format(which, why))
    assert why in found[which][1]
    fault("peer breaks", found[1 - which][1], status=status, detected=seconds, lost=LOST_STEPS)


def pair(config: MeshConfig) -> tuple[list[PeerWatch], list[Progress]]:
    """Both ends of one connection, as two processes have them; their threads do not run."""
    ends, progress = socket.socketpair(), [Progress(), Progress()]
    watches = [
        PeerWatch(i, {1 - i: end}, config, progress[i], leave=lambda code: None)
        for i, end in enumerate(ends)
    ]
    return watches, progress


def after(seconds: float, watches: list[PeerWatch]) -> str:
    """What process 0 judges once both have told that no move was made for so long."""
    for watch in watches:
        watch._tell(0.0)
        watch._tell(seconds)
    for i, watch in enumerate(watches):
        watch._read(1 - i)
    found = watches[0]._judge(time.monotonic())
    return found.line if found else ""


def test_who_has_to_move_and_how_soon():
    """The bounds, without the waiting: 600 s of silence while others wait, 3600 s of a program."""
    config = MeshConfig()
    watches, (zero, one) = pair(config)
    zero.begin(3), one.begin(3)
    with zero.exchange():
        assert "process 1 was lost in step 3 (start: it has not moved" in after(601, watches)
    watches, (zero, one) = pair(config)
    with zero.exchange():
        one.compiles("/jax/core/compile/jaxpr_trace_duration", 1.0)
        assert after(3500, watches) == ""
        one.compiles("/jax/core/compile/backend_compile_duration", 1.0)
        assert "process 1 was lost before the first step" in after(601, watches)
    watches, (zero, one) = pair(config)
    with zero.exchange(), one.taking(1000):
        assert after(1000, watches) == ""
    # both in one exchange, or in one program: nobody is waited for
    watches, (zero, one) = pair(config)
    with zero.exchange(), one.exchange():
        assert after(3500, watches) == ""
        assert "no process has moved for 3700 s" in after(200, watches)


def test_what_another_thread_waits_for_is_not_told():
    """One that samples beside a step asks for the least free memory (`least_of`)."""
    progress = Progress()

    def ask():
        with progress.exchange():
            asked.append(progress.waiting)

    for main in (nullcontext(), progress.exchange()):
        with main:
            before, asked = (progress.waiting, progress.entered, progress.moves), []
            thread = threading.Thread(target=ask)
            thread.start(), thread.join()
            assert asked == [progress.waiting]
            assert (progress.waiting, progress.entered, progress.moves) == before


def test_a_step_is_told_when_it_begins():
    """And not with the next word, by which its process may have been killed."""
    watches, (_, one) = pair(MeshConfig(lost_after_seconds=1000))
    watches[1].start()
    time.sleep(0.2)
    one.begin(7)
    watches[0]._read(1)
    assert watches[0]._peers[1].standing["step"] == 7


@pytest.mark.parametrize(("itself", "line"), [(True, ""), (False, "no word from it for 100 s")])
def test_a_process_that_was_stopped_itself_does_not_blame_the_others(itself, line):
    """A whole job may be suspended for hours."""
    watch, now = pair(MeshConfig())[0][0], time.monotonic()
    watch._last = now - 100 * itself
    watch._peers[1].heard = now - 100
    watch._turn(now)
    found = watch.verdict(0)
    assert (found is not None) == (not itself) and line in (found.line if found else "")


def joining(port: int, process: int, count: int = 2, host: str = "127.0.0.1") -> subprocess.Popen:
    """A process that joins the others, and does nothing else."""
    program = f"""
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import initialize
try:
    initialize(
        MeshConfig(coordinator="{host}:{port}", num_processes={count}, process_id={process})
    )
except UserError as error:
    raise SystemExit(f"refused: {{error}}")
"""
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("process", "other"), [(0, 1), (1, 0)])
def test_a_process_that_waits_says_for_whom_and_hears_ctrl_c(process, other, fault):
    port, began = free_port(), time.monotonic()
    waiting = joining(port, process)
    assert waiting.stderr is not None
    line, detected = waiting.stderr.readline(), time.monotonic() - began
    fault("missing", line, status=130, detected=detected)
    assert line == f"fp8rl: waiting for process {other} of 2 at 127.0.0.1:{port}\n"
    asked = time.monotonic()
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=20)
    assert waiting.returncode == 130 and said.splitlines()[-1] == "fp8rl: interrupted"
    assert time.monotonic() - asked < 3


def test_those_that_are_missing_are_named_and_no_number_is_given_twice():
    port = free_port()
    first, there = joining(port, 0, 4), joining(port, 2, 4)
    said = "fp8rl: waiting for processes 1, 3 of 4"
    for process in (first, there):
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(said):
            assert line.startswith("fp8rl: waiting for process")
    for process, count, reason in (
        (2, 4, "mesh.process_id = 2 is that of another process, too"),
        (1, 3, "mesh.num_processes = 3, and process 0 has 4"),
    ):
        refused = joining(port, process, count)
        _, told = refused.communicate(timeout=30)
        assert refused.returncode == 1
        assert told.splitlines()[-1].startswith(f"refused: {reason}")
    rest = [joining(port, 1, 4), joining(port, 3, 4)]
    for process in (first, there, *rest):
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_port_in_use_is_one_line(address, fault):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        began, refused = time.monotonic(), joining(port, 0)
        _, said = refused.communicate(timeout=30)
    fault("port", said.splitlines()[-1], status=2, detected=time.monotonic() - began)
    assert refused.returncode == 1 and said.splitlines()[-1].startswith("refused: mesh.coordinator")
    assert f"cannot listen on port {port}" in said

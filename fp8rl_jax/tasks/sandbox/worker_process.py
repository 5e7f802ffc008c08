"""The trainer's handle on one reward worker: start it, talk to it, kill it with all that it
started."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from typing import Any

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.tasks.sandbox import processes

_LINUX = sys.platform == "linux"
SUPERVISOR_TIMEOUT = 10.0
# One thread for each BLAS, and no accelerator: a reward must not take the trainer's device memory.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}


class WorkerProcess:
    """One worker under its supervisor. Both end with this process, however it ends (on Linux).

    Args:
        task: its rewards are scored.
        output: file descriptor that takes what the worker prints, to standard output and error.
        objects: file descriptor of what was given in Python (`pickling.pack`).
    """

    def __init__(self, task: TaskConfig, output: int, objects: int):
        self.ready = False
        self.batches = False
        self.in_batch = False
        self.failure: str | None = None
        self.deadline = float("inf")
        self.batch_started = 0.0
        self.batch_size = 0
        self.assigned: deque[Any] = deque()
        self.socket, theirs = socket.socketpair()
        self._received = b""
        # The worker finds what this process finds, on the same path, and not the working directory
        # first (-P).
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        arguments = map(str, (theirs.fileno(), objects, task.reward.max_processes))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fp8rl_jax.tasks.sandbox.worker", *arguments],
                pass_fds=(theirs.fileno(), objects),
                stdin=subprocess.PIPE,  # its end of file ends the supervisor
                stdout=subprocess.PIPE,
                # the worker's standard output, too; the supervisor's own is for how the worker
                # ended
                stderr=output,
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
            )
        self.send(task, timeout=1.0)

    def send(self, message: Any, timeout: float) -> None:
        """Send a pickle.

        A worker that is dead or stuck takes none: its closed socket or its deadline tells.
        """
        self.socket.settimeout(timeout)
        with suppress(OSError):
            self.socket.sendall(pickle.dumps(message))

    def receive(self) -> tuple[list[Any], bool]:
        """Receive (the lines that have come, whether more may come) from a readable socket.

        A line is {"ready": true} or {"failed": why} until the worker is ready, then [result, null],
        [null, error], or "batch".
        """
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._received = (self._received + data).split(b"\n")
            answers = [json.loads(line) for line in lines]
        except (OSError, ValueError):  # ValueError: the reward wrote into the socket
            return [], False
        return answers, bool(data)

    def kill(self) -> str:
        """Kill the worker with all that it started, reap it, and say how it ended."""
        self.socket.close()
        if not _LINUX:
            # refused where only the dead leader is left in the group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        try:
            # Standard input is closed, the supervisor kills all below it and writes how the worker
            # ended.
            report, _ = self.process.communicate(timeout=SUPERVISOR_TIMEOUT)
        except subprocess.TimeoutExpired:
            # A reward has stopped its supervisor; what is below it is still found from here.
            processes.kill_all(processes.descendants(self.process.pid))
            self.process.kill()
            report, _ = self.process.communicate()
        return report.decode(errors="replace") or processes.describe_end(self.process.returncode)

"""The trainer's handle on one reward worker: start it, talk to it, kill its process group."""

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

# One thread for each BLAS, and no accelerator: a reward must not take the trainer's device memory.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}


class WorkerProcess:
    """One worker. Linux kills it when the thread that made this object ends, so that thread must live as long."""

    def __init__(self, task: TaskConfig):
        self.ready = False
        self.failure: str | None = None
        self.deadline = float("inf")
        self.batch_started = 0.0
        self.batch_size = 0
        self.assigned: deque[Any] = deque()
        self.socket, theirs = socket.socketpair()
        self._received = b""
        # The worker finds what this process finds, on the same path, and not the working directory first (-P).
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", "-m", "fp8rl_jax.tasks.worker_main", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            )
        self.send(task, timeout=1.0)

    def send(self, message: Any, timeout: float) -> None:
        """Send a pickle. A worker that is dead or stuck takes none: its closed socket or its deadline tells."""
        self.socket.settimeout(timeout)
        with suppress(OSError):
            self.socket.sendall(pickle.dumps(message))

    def receive(self) -> tuple[list[Any], bool]:
        """(the lines that have come, whether more may come). Call it when the socket is readable."""
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._received = (self._received + data).split(b"\n")
            return [json.loads(line) for line in lines], bool(data)
        except (OSError, ValueError):  # ValueError: the reward wrote into the socket
            return [], False

    def kill(self) -> str:
        """Kill the worker with all that it started, reap it, and say how it ended."""
        self.socket.close()
        # Refused where only the dead leader is left in the group, on macOS.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

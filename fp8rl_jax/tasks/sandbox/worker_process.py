"""The trainer's handle on one reward worker: start it, talk to it, kill it with all that it
started."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.sandbox import processes
from fp8rl_jax.tasks.sandbox.answers import LARGEST_ANSWER

_LINUX = sys.platform == "linux"
SUPERVISOR_TIMEOUT = 10.0
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER"),
)
"""Variables that every reward has, with those that begin with LC_: what programs need to run, and
nothing that may hold a secret."""
# One thread for each BLAS, and no accelerator: a reward must not take the trainer's device memory.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}


def worker_environment(reward: RewardConfig) -> dict[str, str]:
    """Return the environment that workers get, but for PYTHONPATH.

    Raises:
        UserError: task.reward.environment names a variable that is not set.
    """
    if unset := [name for name in reward.environment if name not in os.environ]:
        raise UserError(
            f"task.reward.environment names {unset[0]}, which is not set; set it, or take it out"
        )
    if reward.sandbox == "off":
        return {**os.environ, **_ENVIRONMENT}
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith("LC_")
    }
    return passed | _ENVIRONMENT | {name: os.environ[name] for name in reward.environment}


class WorkerProcess:
    """One worker under its supervisor. Both end with this process, however it ends (on Linux).

    Attributes:
        ready: whether it has imported the rewards.
        proven: whether it has ever answered.

    Args:
        task: its rewards are scored.
        output: file descriptor that takes what the worker prints, to standard output and error.
        objects: file descriptor of what was given in Python (`pickling.pack`).
        columns: those of the problems.
    """

    def __init__(self, task: TaskConfig, output: int, objects: int, columns: tuple[str, ...] = ()):
        self.started = time.monotonic()
        self.ready = False
        self.proven = False
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
        reward = task.reward
        sandbox = reward.sandbox + "-network" * reward.network
        limits = (reward.max_processes, reward.memory_limit_mib)
        arguments = map(str, (theirs.fileno(), objects, sandbox, *limits))
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
                env={**worker_environment(reward), "PYTHONPATH": path},
            )
        self.send((task, columns), timeout=1.0)

    def send(self, message: Any, timeout: float) -> None:
        """Send a pickle.

        A worker that is dead or stuck takes none: its closed socket or its deadline tells.
        """
        self.socket.settimeout(timeout)
        with suppress(OSError):
            self.socket.sendall(pickle.dumps(message))

    def receive(self) -> tuple[list[bytes], bool]:
        """Receive (the lines that have come, whether more may come) from a readable socket."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return [], False
        *lines, self._received = (self._received + data).split(b"\n")
        return lines, bool(data)

    @property
    def is_overfull(self) -> bool:
        """Whether it has sent more without an end than an answer may have."""
        return len(self._received) > LARGEST_ANSWER

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

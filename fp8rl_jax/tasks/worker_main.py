"""The reward worker: a fresh Python process that reads batches of samples from a socket and answers one line a sample.

It imports the standard library and the reward, never JAX. Started by `workers.RewardPool` as
`python -P -m fp8rl_jax.tasks.worker_main SOCKET_FD PARENT_PID`.

Requests are pickles: first the task's configuration, then lists of (prompt, completion, answer, entry). Answers are
lines of JSON, because what comes out of a reward is not to be trusted with the trainer's unpickler: {"ready": true} or
{"failed": "why"}, then [score, null] or [0.0, "error"] for each sample in turn.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import sys

from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.functions import describe_fault
from fp8rl_jax.tasks.rewards import build_scorer, to_score

PR_SET_PDEATHSIG = 1


def main() -> None:
    socket_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent_pid)
    # What a reward starts must not hold the socket open after this process.
    os.set_inheritable(socket_fd, False)
    channel = socket.socket(fileno=socket_fd)
    requests = channel.makefile("rb")

    def answer(line: object) -> None:
        channel.sendall(json.dumps(line).encode() + b"\n")

    task = pickle.load(requests)
    try:
        score = build_scorer(task)
    except UserError as fault:
        answer({"failed": str(fault)})
        return
    _limit_memory(task.reward.memory_limit_mib)
    answer({"ready": True})

    while True:
        try:
            samples = pickle.load(requests)
        except EOFError:
            return
        for sample in samples:
            try:
                result = (to_score(score(*sample)), None)
            # SystemExit and KeyboardInterrupt too: whatever a reward raises costs its own sample only.
            except BaseException as fault:
                result = (0.0, describe_fault(fault))
            answer(result)


def _die_with(parent_pid: int) -> None:
    """Be killed when the thread that started this process ends, however it ends (Linux; elsewhere an idle worker sees
    the closed socket)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit()


def _limit_memory(mebibytes: int) -> None:
    """Allow `mebibytes` of address space on top of what is mapped: imports alone map gigabytes on a large machine."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + mebibytes * 2**20
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()

"""The reward worker: a fresh Python process that reads batches of samples from a socket and answers one line a sample.

It imports the standard library and the rewards, never JAX. `supervisor` starts it.

Requests are pickles: first the task's configuration, then lists of samples, each the arguments of `build_scorer`'s function or
of `build_player`'s. Answers are lines of JSON, because what comes out of a reward is not to be trusted with the trainer's
unpickler: {"ready": true, "warning": ""} or {"failed": "why"}, then [result, null] or [null, "error"] for each sample in turn,
where a result is what that function returned.

Processes that a reward starts for a sample end before the sample is answered. Those that it starts while it is imported are
its helpers and live as long as the worker.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys

from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault
from fp8rl_jax.tasks import reaper
from fp8rl_jax.tasks.environment import EnvironmentFault, build_player
from fp8rl_jax.tasks.rewards import ComponentFault, build_scorer

STRAY_SECONDS = 0.5
LINUX = sys.platform == "linux"


def serve(channel: socket.socket, warning: str = "") -> None:
    """Score what comes through the socket until its other end is closed; `warning` goes to the trainer's log."""
    requests = channel.makefile("rb")

    def answer(line: object) -> None:
        channel.sendall(json.dumps(line).encode() + b"\n")

    task = pickle.load(requests)
    try:
        score = build_player(task) if task.kind == "environment" else build_scorer(task)
    except UserError as fault:
        answer({"failed": str(fault)})
        return
    worker = os.getpid()
    helpers = frozenset(reaper.descendants(worker)) if LINUX else frozenset()
    if LINUX:
        _limit(task.reward.memory_limit_mib, task.reward.file_limit_mib)
    answer({"ready": True, "warning": warning})

    while True:
        try:
            samples = pickle.load(requests)
        except EOFError:
            return
        for sample in samples:
            try:
                result = (score(*sample), None)
            # SystemExit and KeyboardInterrupt too: whatever a reward raises costs its own sample only.
            except BaseException as fault:
                result = (None, str(fault) if isinstance(fault, ComponentFault | EnvironmentFault) else describe_fault(fault))
            if os.getpid() != worker:  # a fork of the reward's that came back: it must not answer twice
                os._exit(0)
            if LINUX and not reaper.kill_descendants(helpers, STRAY_SECONDS):
                return  # they multiply as fast as they are killed; the supervisor can stop that
            answer(result)


def _limit(memory_mib: int, file_mib: int) -> None:
    """Limits for this process and for each that it starts.

    Address space comes on top of what is mapped: imports alone map gigabytes on a large machine. There is no RLIMIT_CPU: a
    worker outlives thousands of samples, and what it starts does not outlive a batch.
    """
    import resource

    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, mapped + memory_mib * 2**20),
        # Python ignores SIGXFSZ, so that its own write raises OSError; another program is killed.
        (resource.RLIMIT_FSIZE, file_mib * 2**20),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))

"""The reward worker: a fresh Python process that reads batches of samples from a socket and answers
one line a sample.

It imports the standard library and the rewards, never JAX. `supervisor` starts it.

Requests are pickles: first the task's configuration, then lists of samples, each the arguments of
`build_scorer`'s function or of `build_player`'s. Answers are lines of JSON, because what comes out
of a reward is not to be trusted with the trainer's unpickler: {"ready": true, "batches": false,
"warning": ""} or {"failed": "why"}, then [result, null] or [null, "error"] for each sample in turn,
where a result is what that function returned. Where there are batch rewards ("batches"), a line
"batch" says first that they have scored the whole list.

Functions that were given in Python come as a pickle in a file, which all workers of the pool share.

Processes that a reward starts for a sample end before the sample is answered. Those that it starts
while it is imported are its helpers and live as long as the worker.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from functools import partial
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault
from fp8rl_jax.tasks import reaper
from fp8rl_jax.tasks.environment import EnvironmentFault, build_player
from fp8rl_jax.tasks.rewards import ComponentFault, build_scorer

STRAY_SECONDS = 0.5
LINUX = sys.platform == "linux"


def serve(channel: socket.socket, objects_fd: int, warning: str = "") -> None:
    """Score what comes through the socket until its other end is closed.

    Args:
        channel: requests and answers.
        objects_fd: file of `python_objects.pack`.
        warning: goes to the trainer's log.
    """
    requests = channel.makefile("rb")

    def answer(line: object) -> None:
        channel.sendall(json.dumps(line).encode() + b"\n")

    task = pickle.load(requests)
    try:
        objects = _objects(objects_fd)
        score = (
            build_player(task, objects)
            if task.kind == "environment"
            else build_scorer(task, objects)
        )
    except UserError as fault:
        answer({"failed": str(fault)})
        return
    batches = bool(getattr(score, "batch_rewards", {}))
    worker = os.getpid()
    helpers = frozenset(reaper.descendants(worker)) if LINUX else frozenset()
    if LINUX:
        _limit(task.reward.memory_limit_mib, task.reward.file_limit_mib)
    answer({"ready": True, "batches": batches, "warning": warning})

    def is_over() -> bool:
        """Ends what the reward left running; whether that failed."""
        if os.getpid() != worker:  # a fork of the reward's that came back: it must not answer twice
            os._exit(0)
        # They may multiply as fast as they are killed; the supervisor can stop that.
        return LINUX and not reaper.kill_descendants(helpers, STRAY_SECONDS)

    while True:
        try:
            samples = pickle.load(requests)
        except EOFError:
            return
        calls = score.batch(samples) if batches else [partial(score, *sample) for sample in samples]
        if batches:
            if is_over():
                return
            answer("batch")
        for call in calls:
            try:
                result = (call(), None)
            # SystemExit and KeyboardInterrupt too: whatever a reward raises costs its own sample
            # only.
            except BaseException as fault:
                result = (
                    None,
                    str(fault)
                    if isinstance(fault, ComponentFault | EnvironmentFault)
                    else describe_fault(fault),
                )
            if is_over():
                return
            answer(result)


def _objects(descriptor: int) -> dict[str, Any]:
    """What was given in Python, by `<python>:NAME`. It is read by position: the workers share one
    offset."""
    packed = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    if not packed:
        return {}
    try:
        return pickle.loads(packed)
    # A module that they belong to may raise anything, or call sys.exit, while it is imported.
    except (Exception, SystemExit) as fault:
        raise UserError(
            f"what was given in Python does not load in the reward workers: {describe_fault(fault)}"
        ) from fault


def _limit(memory_mib: int, file_mib: int) -> None:
    """Limits for this process and for each that it starts.

    Address space comes on top of what is mapped: imports alone map gigabytes on a large machine.
    There is no RLIMIT_CPU: a worker outlives thousands of samples, and what it starts does not
    outlive a batch.
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

"""The process of a reward worker, and its supervisor, which ends it with all that it started.

    python -P -m fp8rl_jax.tasks.sandbox.worker SOCKET_FD OBJECTS_FD SANDBOX MAX_PROCESSES MEMORY

The supervisor is this process; it forks the worker before anything of the user's is imported. Then
it answers the worker's forks (the fork gate of `seccomp`), bounds the memory of all that the worker
has started (`cgroup`) or looks at it, and waits for the end: of the worker, or of standard input,
which the trainer holds open for as long as it lives and wants the worker. It is a subreaper, so
when the worker is gone, all that the worker has started, daemons in sessions of their own too, is
below the supervisor. It kills that, writes one line about the worker's end to standard output, and
exits only when nothing is left. SANDBOX is "off", "process", "strict" or "strict-network": under
"strict" the worker, and not its supervisor, gives up its rights first (`strict`); under "process" a
reward can still kill its supervisor, which isolates faults, not malice. Elsewhere than on Linux
there is nothing of the kind; the worker then runs in this process.

The worker reads batches of samples from a socket and answers one line a sample. It imports the
standard library and the rewards, never JAX. Requests are pickles: first the task's configuration
and the columns of its problems, then lists of samples, each the arguments of `build_scorer`'s
function or of `build_player`'s.
Answers are lines of JSON (`answers`), because what comes out of a reward is not to be trusted with
the trainer's unpickler: {"ready": true, "batches": false, "warning": ""} or {"failed": "why"}, then
[result, null] or [null, "error"] for each sample in turn, where a result is what that function
returned. Where there are batch rewards ("batches"), a line "batch" says first that they have scored
the whole list. Functions that were given in Python come as a pickle in a file, which all workers of
the pool share.

Processes that a reward starts for a sample end before the sample is answered. Those that it starts
while it is imported are its helpers and live as long as the worker.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault
from fp8rl_jax.tasks.environment import EnvironmentFault, build_player
from fp8rl_jax.tasks.rewards import ComponentFault, build_scorer
from fp8rl_jax.tasks.sandbox import cgroup, processes, seccomp, strict
from fp8rl_jax.tasks.sandbox.answers import BATCH, LARGEST_ANSWER
from fp8rl_jax.tasks.verifiers_environment import build_verifiers_player

# How often memory is looked at while there is more than the worker itself, which has its own limit;
# and processes are counted where their forks cannot be answered.
_SECONDS_BETWEEN_COUNTS = 0.02
# How often the parent is looked at: a fork of the trainer's, which outlives it, would keep standard
# input open.
_SECONDS_BETWEEN_LOOKS = 1.0
_STRAY_SECONDS = 0.5
_LINUX = sys.platform == "linux"


def main() -> None:
    """Start and watch one worker; the arguments are those of the module."""
    socket_fd, objects_fd = map(int, sys.argv[1:3])
    sandbox, max_processes, memory_mib = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    # What a reward starts must not hold these open after this process.
    os.set_inheritable(socket_fd, False)
    os.set_inheritable(objects_fd, False)
    channel = socket.socket(fileno=socket_fd)
    report_fd = os.dup(1)
    if sys.platform != "linux":
        _print_to_the_log()
        serve(channel, objects_fd)
        return
    trainer = os.getppid()
    scratch = tempfile.mkdtemp(prefix="fp8rl-reward-") if sandbox.startswith("strict") else ""
    group = None if sandbox == "off" else cgroup.make()
    processes.adopt_orphans()
    ours, theirs = socket.socketpair()
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        processes.die_with_parent()
        if os.getppid() != supervisor:
            os._exit(1)
        ours.close()
        os.close(report_fd)
        _print_to_the_log()
        # A session of its own: a reward that kills its process group must not kill the supervisor.
        os.setsid()
        processes.adopt_orphans()
        # not before it is in its group: what it starts would be outside
        group = group if theirs.recv(1) == b"g" else None
        serve(channel, objects_fd, partial(_begin, theirs, sandbox, scratch), theirs, group)
        return
    channel.close()
    os.close(objects_fd)
    theirs.close()
    if group and not group.take(worker):
        group.remove()
        group = None
    ours.send(b"g" if group else b"-")
    limits = None if sandbox == "off" else _Limits(max_processes, memory_mib, group)
    end = _watch(worker, ours, limits, trainer)
    # From here on no fork is answered, so nothing that is being killed can multiply.
    if not processes.kill_descendants():
        end += " and left processes behind that cannot be killed"
    if group:
        group.remove()
    os.write(report_fd, end.encode())
    if scratch:
        with suppress(RecursionError):
            shutil.rmtree(scratch, ignore_errors=True)


def _begin(supervisor: socket.socket, sandbox: str, scratch: str) -> str:
    """Give up what the sandbox takes; returns what of it is not to be had, for the log.

    Raises:
        UserError: the strict sandbox is not to be had.
    """
    if sandbox == "off":
        supervisor.send(b"none")
        return ""
    warning = _hand_over_forks(supervisor)
    if scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        taken = strict.policy(sandbox == "strict-network", strict.landlock_abi())
        try:
            strict.confine(taken, Path(scratch))
        except OSError as fault:
            raise UserError(
                f'task.reward.sandbox = "strict" is not possible here ({fault.strerror}); a '
                'container may forbid it: allow it there, or set sandbox = "process"'
            ) from fault
    return warning


def _print_to_the_log() -> None:
    """Standard output goes where standard error goes, line by line: a worker that is killed has
    written what it printed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)


def _hand_over_forks(supervisor: socket.socket) -> str:
    """Put this process's forks into the supervisor's hands; returns what speaks against it, for the
    log."""
    try:
        listener = seccomp.install_fork_gate()
    except OSError as fault:
        supervisor.send(b"none")
        return (
            f"the kernel does not let forks be counted ({fault.strerror}); a fork bomb is "
            "stopped, but later"
        )
    socket.send_fds(supervisor, [b"gate"], [listener])
    os.close(listener)
    return ""


@dataclass(frozen=True)
class _Limits:
    processes: int
    memory_mib: int
    group: cgroup.Group | None
    """Bounds the memory; without one it is looked at."""

    @property
    def too_much(self) -> str:
        return (
            f"held more than task.reward.memory_limit_mib = {self.memory_mib} with what it started"
        )


def _watch(
    worker: int, socket_of_worker: socket.socket, limits: _Limits | None, trainer: int
) -> str:
    """Answer forks until the worker has ended or has to end, and say how it ended."""
    _, listeners, _, _ = socket.recv_fds(socket_of_worker, 4, 1)
    listener = listeners[0] if listeners else None
    events = select.poll()
    pidfd, loaded = os.pidfd_open(worker), socket_of_worker.fileno()
    for descriptor in (pidfd, 0, loaded, *listeners):
        events.register(descriptor, select.POLLIN)
    allowed_bytes, company, next_look = 0, False, 0.0
    while True:
        counting = limits is not None and (listener is None or company)
        seconds = _SECONDS_BETWEEN_COUNTS if counting else _SECONDS_BETWEEN_LOOKS
        ready = {descriptor for descriptor, _ in events.poll(seconds * 1000)}
        if pidfd in ready or 0 in ready or os.getppid() != trainer:
            # It is not reaped yet, so its process id is no other's; an ended one stays ended.
            os.kill(worker, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            if limits and limits.group and limits.group.has_killed():
                return limits.too_much
            return processes.describe_end(status)
        if loaded in ready and limits:
            below = processes.descendants(worker)
            if limits.group:
                limits.group.allow(limits.memory_mib * 2**20)
            else:
                allowed_bytes = processes.held([worker, *below]) + limits.memory_mib * 2**20
            company = bool(below)
        if loaded in ready:
            events.unregister(loaded)
            socket_of_worker.recv(16)
            socket_of_worker.close()
        if limits is None:
            continue
        if listener is not None and listener in ready:
            allowed = len(processes.descendants(worker)) < limits.processes
            seccomp.answer_fork(listener, allowed)
            company = True
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + _SECONDS_BETWEEN_COUNTS
        below = processes.descendants(worker)
        company = bool(below)
        if listener is None and len(below) > limits.processes:
            return f"had more than task.reward.max_processes = {limits.processes} processes running"
        if limits.group and limits.group.has_killed():
            return limits.too_much
        if allowed_bytes and below and processes.memory_above([worker, *below], allowed_bytes):
            return limits.too_much


def serve(
    channel: socket.socket,
    objects_fd: int,
    begin: Callable[[], str] = lambda: "",
    supervisor: socket.socket | None = None,
    group: cgroup.Group | None = None,
) -> None:
    """Score what comes through the socket until its other end is closed.

    Args:
        channel: requests and answers.
        objects_fd: file of `pickling.pack`.
        begin: called before anything of the user's is imported; returns a warning for the trainer's
            log, and may raise UserError.
        supervisor: waited for when the rewards are imported, until it closes its end.
        group: this process is in it; it ends where the kernel has killed one of the group's.
    """
    requests = channel.makefile("rb")

    def answer(line: object) -> None:
        text = json.dumps(line).encode()
        if len(text) > LARGEST_ANSWER:
            error = f"the answer has {len(text):,} bytes, and {LARGEST_ANSWER:,} are the most"
            text = json.dumps([None, error]).encode()
        channel.sendall(text + b"\n")

    task, columns = pickle.load(requests)
    try:
        warning = begin()
        objects = _objects(objects_fd)
        if task.kind == "verifiers":
            batch, score = None, build_verifiers_player(task)
        elif task.is_environment:
            batch, score = None, build_player(task, objects)
        else:
            score = build_scorer(task, objects, columns)
            batch = score.batch if score.batch_rewards else None
    except UserError as fault:
        answer({"failed": str(fault)})
        return
    worker = os.getpid()
    helpers = frozenset(processes.descendants(worker)) if _LINUX else frozenset()
    if _LINUX and task.reward.sandbox != "off":
        _limit(task.reward.memory_limit_mib, task.reward.file_limit_mib)
    if supervisor is not None:
        supervisor.send(b"loaded")
        supervisor.recv(1)
        supervisor.close()
    answer({"ready": True, "batches": batch is not None, "warning": warning})

    def is_over() -> bool:
        """Ends what the reward left running; whether that failed, or there was too much of it."""
        if os.getpid() != worker:  # a fork of the reward's that came back: it must not answer twice
            os._exit(0)
        # They may multiply as fast as they are killed; the supervisor can stop that.
        left = _LINUX and not processes.kill_descendants(helpers, _STRAY_SECONDS)
        return left or (group is not None and group.has_killed())

    while True:
        try:
            samples = pickle.load(requests)
        except EOFError:
            return
        if batch is None:
            calls = [partial(score, *sample) for sample in samples]
        else:
            calls = batch(samples)
            if is_over():
                return
            answer(BATCH)
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


if __name__ == "__main__":
    main()

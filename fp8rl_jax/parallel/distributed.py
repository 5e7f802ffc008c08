"""Runs of several processes: joining them, and moving arrays between one host's memory and all
devices.

Every process runs the same program on its own devices (multi-controller JAX). Values that the hosts
compute, such as prompts and rewards, must be equal on all of them before they become a global
array, and a global array must be gathered before a host reads it. With one process each function
here is what `jax.device_put` and `jax.device_get` do.

What one process alone finds out (a file that it cannot read, a reward that timed out on its host)
it must tell the others before anyone acts on it: `sum_over_processes` and `shared_faults` do,
before devices are touched `told_by_first`, and beside steps that run `least_of`. What it can tell
them no more in this way, and the loss of one of them, watch.py is for: `leave_on_failure`.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import RESUMABLE, Interrupted, UserError
from fp8rl_jax.parallel.watch import PROGRESS, PeerWatch, meet

_SLURM_STEP = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPICH": ("PMI_SIZE", "PMI_RANK"),
    "torchrun": ("WORLD_SIZE", "RANK"),
    "a Kubernetes Indexed Job": ("", "JOB_COMPLETION_INDEX"),
}
"""Variables of the number of processes, and of this one's number."""
_FOUND_BY_JAX = ("SLURM", "Open MPI")
_FAULT_BYTES = 1000
_SIGNS_OF_LOSS = ("Gloo ", "NCCL ", "onnection closed by peer", "onnection reset by peer")
_JAX_HEARTBEAT = 100
"""Seconds, JAX's own default."""
_TO_TELL = 60.0
"""Seconds that processes may come apart from each other."""
_TO_COME = 3600.0
"""The same where one may still compile, or load."""
_ASKED: Counter[str] = Counter()


class _SharedFault(UserError):
    """A fault that every process knows of, and raises."""


def initialize(config: MeshConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Join this process to the others of its run, before anything touches a JAX device.

    With mesh.coordinator set, it, mesh.num_processes and mesh.process_id are used; what is not set
    of the latter is taken from SLURM, Open MPI, MPICH, torchrun or a Kubernetes Indexed Job.
    Otherwise a SLURM step (`srun`) or an Open MPI launch of more than one task is detected, and jax
    finds its coordinator. Otherwise the run has one process and nothing happens.

    Raises:
        UserError: a mesh.* key is missing or out of range, the coordinator's port is in use, not
            all processes come, each with a number of its own, or a launcher has started several
            and does not say where process 0 is.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        _spare_threads()
    place, devices = _explicit(config, environ), None
    if place is None:
        launcher, count, number = _launched(environ)
        if launcher not in _FOUND_BY_JAX:
            _refuse_alone(launcher, count, number)
            return
        if count <= 1:
            return
        devices = _local_devices(environ)
        place = _detected()
    address, count, process = place
    _spare_threads()
    # it would take SIGTERM for itself; training/stopping.py does what is wanted then
    jax.config.update("jax_enable_preemption_service", False)
    try:
        links = meet(address, count, process)
        _join(
            coordinator_address=address,
            num_processes=count,
            process_id=process,
            local_device_ids=devices,
            # ours comes first
            heartbeat_timeout_seconds=max(_JAX_HEARTBEAT, int(2 * config.lost_after_seconds)),
        )
    except KeyboardInterrupt:
        # the thread of `_join` is in C++ code, which no exit would get past
        print("fp8rl: interrupted", file=sys.stderr)
        _leave(130)
    if links:
        _RUN.watch = PeerWatch(process, links, config)
        _RUN.watch.start()
        # runs before jax's own exit function, because it is registered after it
        atexit.register(_RUN.watch.farewell, 0)


def _spare_threads() -> None:
    """Give a CPU more threads than cores: each program that has begun holds one for each device as
    long as it waits for others, and with none left all wait for ever."""
    os.environ.setdefault("PJRT_NPROC", str(max(16, os.cpu_count() or 1)))


class _Run:
    """What this process knows of its run.

    Attributes:
        watch: None where the run has one process.
        left: whether the process has begun to end by itself.
    """

    watch: PeerWatch | None = None
    left = False


_RUN = _Run()


def is_main_process() -> bool:
    """Tell whether this process writes metrics, reports and exported models."""
    return jax.process_index() == 0


def is_first_process() -> bool:
    """Tell the same before any device is touched."""
    return distributed.global_state.process_id == 0


def told_by_first(name: str, find: Callable[[], str], seconds: float) -> str:
    """Have process 0 find something out, and tell all; no device is touched.

    Args:
        name: of what is told, once a run.
        find: run by process 0 alone.
        seconds: that it may take.

    Raises:
        UserError: process 0 has told nothing in this time.
    """
    client = distributed.global_state.client
    if client is None:
        return find()
    if is_first_process():
        with PROGRESS.taking(seconds):
            found = find()
        with PROGRESS.exchange():
            client.key_value_set(name, found)
        return found
    with PROGRESS.exchange():
        try:
            return client.blocking_key_value_get(name, int(1000 * (seconds + _TO_TELL)))
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"mesh: process 0 has told nothing of {name} within {seconds + _TO_TELL:g} s; "
                "see what it says, and start every process with the same command and kind of GPU"
            ) from error


def least_of(name: str, value: float, processes: Iterable[int]) -> float:
    """Find the least of a number that these processes have, this one among them.

    Without a collective, so that a thread may ask while steps run.

    Args:
        name: of the number. Under one name the processes ask equally often, in one order.

    Raises:
        UserError: one of them has told nothing.
    """
    client, own = distributed.global_state.client, distributed.global_state.process_id
    others = set(processes) - {own}
    if client is None or not others:
        return value
    _ASKED[name] += 1
    key = f"{name}, {_ASKED[name]}"
    with PROGRESS.exchange():
        client.key_value_set(f"{key}, of {own}", repr(value))
        try:
            told = [
                client.blocking_key_value_get(f"{key}, of {other}", int(1000 * _TO_COME))
                for other in sorted(others)
            ]
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"mesh: not every process has told its {name} within {_TO_COME:g} s; see what each "
                "says, and start every process with the same command"
            ) from error
    return min(value, *map(float, told))


def to_global(tree: Any, shardings: Any) -> Any:
    """Spread arrays that are equal on every process over all devices.

    A process copies only what its devices hold.

    Args:
        tree: numpy or jax arrays, PRNG keys among them. An array that already spans processes is
            resharded.
        shardings: one sharding, or a tree of them like `tree`.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_to_global, tree, shardings)


def to_host(tree: Any) -> Any:
    """Copy every leaf to a numpy array of its global shape, on every process.

    All processes must call it together.
    """
    return jax.tree.map(_to_host, tree)


def sum_over_processes(tree: Any) -> Any:
    """Sum numpy arrays of the same shapes over all processes.

    All processes must call it together.
    """
    return jax.tree.map(lambda stacked: stacked.sum(0), _allgather(tree))


def gather_text(text: str) -> list[str]:
    """Gather the texts of all processes, in their order; all processes must call it together."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(_allgather(np.int32(len(data)))).reshape(-1)
    # a power of two, so that few shapes are compiled
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


@contextmanager
def shared_faults() -> Generator[None]:
    """Raise a UserError that the block raises on one process on all of them.

    All must enter and leave it together.

    The block must hold no collective that a process with a fault would leave the others alone in.
    """
    fault: UserError | None = None
    try:
        yield
    except UserError as error:
        fault = error
    told = np.zeros(_FAULT_BYTES, np.uint8)
    if fault is not None:
        text = f"process {jax.process_index()}: {fault}".encode()[:_FAULT_BYTES]
        told[: len(text)] = np.frombuffer(text, np.uint8)
    for row in _allgather(told):
        if row.any():
            # each says its own, and those without one the first
            raise _SharedFault(
                str(fault or row.tobytes().rstrip(b"\0").decode(errors="replace"))
            ) from fault


@contextmanager
def leave_on_failure() -> Generator[None]:
    """End this process without waiting for the others once an exception has left the block.

    One that the others do not know of. An ordinary exit would wait for them (jax.distributed,
    300 s), and they for this process in a collective. So they are told, and end, too.

    Raises:
        Interrupted: in place of what a collective raises when another process was lost.
        UserError: in place of it when another process ended by an error of its own.
    """
    try:
        yield
    except _SharedFault:
        raise
    except BaseException as error:
        watch = _RUN.watch
        if watch is None or _RUN.left:
            raise
        _RUN.left = True
        found = watch.verdict(watch.seconds_to_a_verdict if _tells_of_loss(error) else 0.0)
        status = found.status if found else _exit_status(error)
        if found is None:
            # a fault in a connection of its own, too: to start it again would not help
            watch.farewell(status, _said(error))
        atexit.register(_leave, status)
        if found is None or isinstance(error, Interrupted):
            raise
        raise (Interrupted if status == RESUMABLE else UserError)(found.line) from None


def check_same(config_text: str) -> None:
    """Check at start-up that every process runs the same configuration.

    All processes must call it together. Those that disagree would compile different programs and
    wait for each other for ever.

    Args:
        config_text: the resolved configuration, without mesh.process_id.

    Raises:
        UserError: on every process, naming those that differ from process 0.
    """
    digest = np.frombuffer(hashlib.sha256(config_text.encode()).digest(), np.uint8)
    digests = _allgather(digest)
    different = [i for i, other in enumerate(digests) if (other != digests[0]).any()]
    if different:
        shown = ", ".join(map(str, different))
        raise _SharedFault(
            f"process {shown} has another configuration than process 0: start every process with "
            "the same "
            "files and options (mesh.process_id apart)"
        )


def _tells_of_loss(error: BaseException) -> bool:
    """Whether this is what a collective raises when the connection to another process broke: a
    ValueError or a JaxRuntimeError, by the path that it takes."""
    return isinstance(error, ValueError | jax.errors.JaxRuntimeError) and any(
        sign in str(error) for sign in _SIGNS_OF_LOSS
    )


def _exit_status(error: BaseException) -> int:
    if isinstance(error, Interrupted):
        return RESUMABLE
    return 2 if isinstance(error, UserError) else 1


def _said(error: BaseException) -> str:
    text = f"{error}".strip()
    line = text.splitlines()[0] if text else ""
    return line if isinstance(error, UserError | Interrupted) else f"{type(error).__name__}: {line}"


def _join(**arguments: Any) -> None:
    """Call jax.distributed.initialize, which has no ear for Ctrl-C, in a thread.

    Raises:
        UserError: the others are not there any more.
    """
    faults: list[BaseException] = []

    def attempt() -> None:
        try:
            jax.distributed.initialize(**arguments)
        # raised again in the main thread
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=attempt, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
    for fault in faults:
        if isinstance(fault, jax.errors.JaxRuntimeError):
            raise UserError(
                f"mesh: the processes could not be joined ({str(fault).splitlines()[0][:200]})"
            ) from fault
        raise fault


def _allgather(x: Any, tiled: bool = False) -> Any:
    with PROGRESS.exchange():
        return multihost_utils.process_allgather(x, tiled=tiled)


def _leave(code: int) -> None:
    if _RUN.watch is not None:
        _RUN.watch.wait_for_others()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _detected() -> tuple[str, int, int]:
    """(coordinator, processes, number of this one) of the launch, as jax finds them."""
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, None)
        address, count, process, _ = found
    except (ImportError, KeyError, RuntimeError, ValueError):  # of a launcher that jax half knows
        address = count = process = None
    if address is None or count is None or process is None:
        raise UserError(
            "mesh: the processes of this launch do not say where process 0 is; set "
            "mesh.coordinator to host:port of it"
        )
    return address, count, process


def _launched(environ: Mapping[str, str]) -> tuple[str, int, int]:
    """(launcher, processes, number of this one); 0 and -1 where nothing says it.

    A SLURM allocation without `srun` is one process, however many tasks it has room for.
    """
    if all(name in environ for name in _SLURM_STEP):
        return "SLURM", int(environ["SLURM_NTASKS"]), int(environ["SLURM_PROCID"])
    for launcher, (count, number) in _LAUNCHERS.items():
        if number in environ and (not count or count in environ):
            return launcher, int(environ.get(count, 0)), int(environ[number])
    return "", 0, -1


def _refuse_alone(launcher: str, count: int, number: int) -> None:
    """Refuse to train alone beside others that do the same.

    The first pod of an Indexed Job cannot tell whether there are others; these then refuse.
    """
    if count > 1 or (not count and number > 0):
        size = "" if count else " and mesh.num_processes"
        raise UserError(
            f"mesh: this is process {number} of several that {launcher} has started, and each "
            f"would train alone: set mesh.coordinator = host:port of process 0{size}"
        )


def _explicit(config: MeshConfig, environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(coordinator, num_processes, process_id), or None where the configuration names none of
    them."""
    if config.coordinator:
        _, count, number = _launched(environ)
        config = replace(
            config,
            num_processes=config.num_processes or count,
            process_id=number if config.process_id == -1 else config.process_id,
        )
    given = {
        "coordinator": config.coordinator != "",
        "num_processes": config.num_processes != 0,
        "process_id": config.process_id != -1,
    }
    if not any(given.values()):
        return None
    missing = [f"mesh.{key}" for key, is_given in given.items() if not is_given]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be set: coordinator, num_processes and process_id belong "
            "together"
        )
    host, _, port = config.coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"mesh.coordinator = {config.coordinator!r} must be host:port of process 0")
    if not 0 <= config.process_id < config.num_processes:
        last = config.num_processes - 1
        raise UserError(
            f"mesh.process_id = {config.process_id} must be from 0 to mesh.num_processes - 1 = "
            f"{last}"
        )
    return config.coordinator, config.num_processes, config.process_id


def _local_devices(environ: Mapping[str, str]) -> list[int] | None:
    """Which of the visible GPUs this task takes: an empty list for all of them, None for jax's
    choice.

    jax takes the GPU of the task's number on its node, which fits one task a GPU where every task
    sees every GPU. A task that is alone on its node, or that the scheduler bound to a GPU of its
    own, takes all that it sees; fewer tasks than GPUs share them out.
    """
    if not all(name in environ for name in _SLURM_STEP):
        return None
    tasks = int(environ["SLURM_NTASKS"]) // int(environ["SLURM_STEP_NUM_NODES"])
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if tasks <= 1 or len(visible) == 1:
        return []
    if len(visible) > tasks and len(visible) % tasks == 0:
        share, local = len(visible) // tasks, int(environ["SLURM_LOCALID"])
        return list(range(local * share, (local + 1) * share))
    return None


def _to_global(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _to_global(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _to_host(x: Any) -> np.ndarray:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return _allgather(x, tiled=True)

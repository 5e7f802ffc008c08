"""Runs the jobs in processes of their own, in order of value, and within the time of the command.

A process that hangs or crashes costs its own job: it is ended, the job is recorded as failed with
the reason, and a new process goes on. What is only compiled or checked runs in many processes at
once, what is timed in one, alone. No job is begun that might not end in time: it is left for the
next command. Compiled programs reach another process through JAX's persistent cache; before
anything relies on that, a check that has passed where it was compiled must pass with the program
from the cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

from experiments.benchmarks import machine
from experiments.benchmarks.gpu.jobs import PARTS, Job, Setting
from experiments.benchmarks.gpu.record import Folder
from experiments.benchmarks.peer import Link, NoAnswer
from fp8rl_jax.errors import UserError
from pallas_kernels.check.sources import ROOT

START_SECONDS = 120.0  # that a process may take until it can run a job, on a machine that never did
USUAL_START_SECONDS = 20.0  # until one is known
ENDING_SECONDS = 10.0  # of a command, in which no job runs
MOST_PROCESSES = 12  # together: each holds half a gigabyte of the card
MOST_HANGS = 2
PAUSE_SECONDS = 2.0  # until a driver has taken back the memory of a process that was ended
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}

STAGES: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("checks",), True),
    (("copy", "matmul", "attention", "grouped", "formats"), True),
    (("decode", "step"), False),
    (("exact",), False),
    (("copy", "matmul", "grouped", "attention", "formats", "quantize"), False),
    (("checks",), False),
)
"""Parts, and whether only what is wanted first of them."""


class Task(NamedTuple):
    part: str
    job: Job
    compile_only: bool = False


class Process(Protocol):
    """A worker: `Link`, or what a test puts in its place."""

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]: ...
    def receive(self, seconds: float) -> dict[str, Any]: ...
    def stderr(self) -> str: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[[dict[str, str]], Process]
"""Starts a worker, with what its environment has beside this process's own."""


@dataclass
class Clock:
    """Seconds since any time, and how to let some pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def start_worker(setting: Setting, words: list[str], cache: Path, own: dict[str, str]) -> Link:
    """A process of `worker.py`, whose compiled programs go into the cache and come from there."""
    command = [
        sys.executable,
        "-m",
        "experiments.benchmarks.gpu.worker",
        json.dumps(asdict(setting)),
        json.dumps(words),
    ]
    cached = {
        "JAX_COMPILATION_CACHE_DIR": str(cache.resolve()),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return Link(
        command,
        os.environ | cached | ({"JAX_PLATFORMS": "cpu"} if setting.tiny else {}) | own,
        ROOT,
    )


class Slot:
    """A place for one worker at a time, started when it is first needed, with `own` of its
    environment."""

    def __init__(self, start: Start, own: dict[str, str], log: Callable[[str, str], None]):
        self._start, self._own, self._log = start, own, log
        self._process: Process | None = None
        self.identity: dict[str, Any] = {}

    @property
    def running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """From another thread: whoever asks gets no answer."""
        if (process := self._process) is not None:
            process.kill()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request; where it raises NoAnswer, the worker has been ended."""
        title = f"{request['part']}: {request['label']}"
        try:
            answer = self._process.ask(request, seconds)
        except NoAnswer as reason:
            self._log(f"{title}: {reason}", self._process.stderr())
            self.close()
            raise
        if "failed" in answer:
            self._log(f"{title}: {answer['failed']}", self._process.stderr())
        if not answer["usable"]:
            self.close()
        return answer

    def start(self, seconds: float) -> None:
        """
        Raises:
            NoAnswer: it did not come up.
            UserError: what it says is at fault.
        """
        self._process = self._start(self._own)
        try:
            self.identity = self._process.receive(seconds)
        except NoAnswer as reason:
            self._log(f"start: {reason}", self._process.stderr())
            self.close()
            raise
        if "fault" in self.identity:
            raise UserError(self.identity["fault"])

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Runner:
    """One command.

    Args:
        folder: what there is, and where the rest goes.
        start: of a worker.
        seconds: that all of it may take.
        processes: how many run together.
        memory: of the card's, what one that runs alone takes at its start.
    """

    def __init__(
        self,
        folder: Folder,
        start: Start,
        seconds: float,
        processes: int,
        memory: float = 0.9,
        clock: Clock | None = None,
    ):
        self.folder, self.start, self.processes, self.memory = folder, start, processes, memory
        self.clock = clock or Clock()
        self.end = self.clock.now() + seconds - ENDING_SECONDS
        self.begun = self.clock.now()
        self.hangs: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        # whether programs from the cache are right; None: not known yet
        self.cached: bool | None = None
        self._stopped = False
        self._longest: dict[tuple[str, bool], float] = {}
        self._usual_start = USUAL_START_SECONDS
        self._lock = Lock()

    def run(self, parts: Iterable[str]) -> dict[str, str]:
        """Run what is left of the parts, in the order of `STAGES`.

        Returns:
            Part -> what is left of it, and why.

        Raises:
            UserError: the device is not the folder's, or is no Hopper GPU.
        """
        parts = set(parts)
        for names, first in STAGES:
            tasks = [
                Task(name, job)
                for name in names
                if name in parts
                for job in self.folder.left(name, first)
            ]
            ahead = [task._replace(compile_only=True) for task in tasks if PARTS[task.part].ahead]
            if len(ahead) > 1 and self.cached is not False:
                self.run_parallel(ahead)
            shared = [task for task in tasks if PARTS[task.part].parallel]
            # what raised beside others may have wanted memory that they had: again, alone
            self.run_alone(
                [task for task in tasks if task not in shared] + self.run_parallel(shared)
            )
        left = {name: len(self.folder.left(name)) for name in PARTS if name in parts}
        return {
            name: f"{count} left: {self.reasons.get(name, 'out of time')}"
            for name, count in left.items()
            if count
        }

    def run_parallel(self, tasks: list[Task]) -> list[Task]:
        """Run tasks in many processes.

        Returns:
            Those to be run alone, of which nothing is recorded: what raised, and what no process
            could be started for.
        """
        queue, raised = deque(tasks), []

        slots = [self._slot(SHARED) for _ in range(min(self.processes, len(tasks)))]

        def serve(slot: Slot) -> None:
            with slot:
                for task, outcome in self._served(queue, slot):
                    if "failed" in outcome and outcome["usable"] and not task.compile_only:
                        raised.append(task)
                    elif not task.compile_only:
                        self._store(task, outcome, slot)

        with ThreadPoolExecutor(max(len(slots), 1)) as pool:
            try:
                for future in as_completed([pool.submit(serve, slot) for slot in slots]):
                    future.result()
            except BaseException:  # the command ends, and its threads do not wait for jobs
                self._stopped = True
                for slot in slots:
                    slot.kill()
                raise
        return raised + list(queue)

    def run_alone(self, tasks: list[Task]) -> None:
        """Run tasks one after the other; nothing else runs."""
        queue, own = deque(tasks), {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(self.memory)}
        if not queue:
            return
        before = machine.gpu_state()
        with machine.GpuMonitor() as monitor, self._slot(own) as slot:
            if self.cached is None:
                self._try_cache(slot)
            for task, outcome in self._served(queue, slot):
                self._store(task, outcome, slot)
        parts = {task.part for task in tasks}
        self.folder.note_card(
            parts, {"before": before, "during": monitor.summary(), "after": machine.gpu_state()}
        )

    def _try_cache(self, slot: Slot) -> None:
        """Run again, with programs from the cache, a small check that has passed; without one,
        nothing is known."""
        results = self.folder.records.get("checks", {"results": {}})["results"]
        passed = [
            job
            for job in self.folder.jobs["checks"]
            if job.first and results.get(job.label, {}).get("passed")
        ]
        for _, outcome in self._served(deque(Task("checks", job) for job in passed[-1:]), slot):
            self.cached = outcome.get("result", {}).get("passed", False)
        if self.cached is False:
            slot.close()
            print(
                "a kernel from the cache is wrong or fails here: every process compiles its own",
                flush=True,
            )

    def _slot(self, own: dict[str, str]) -> Slot:
        def start(own: dict[str, str]) -> Process:
            return self.start(own | (UNCACHED if self.cached is False else {}))

        return Slot(start, own, self.folder.log)

    def _served(self, queue: deque[Task], slot: Slot) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Tasks of the queue and what came of them, as long as there is something to say."""
        while (task := self._next(queue, slot)) is not None:
            if not slot.running and not self._started(slot, task.part):
                queue.appendleft(task)
                return
            if (outcome := self._ask(slot, task)) is None:
                return
            yield task, outcome

    def _next(self, queue: deque[Task], slot: Slot) -> Task | None:
        """The first that may be begun: its time fits into what is left, and its operation has not
        hung too often."""
        with self._lock:
            while queue and not self._stopped:
                task = queue.popleft()
                starting = 0.0 if slot.running else self._usual_start
                if self.hangs[task.job.operation] >= MOST_HANGS:
                    self.reasons[task.part] = (
                        f"{MOST_HANGS} jobs of {task.job.operation} hung or crashed in this command"
                    )
                elif self.clock.now() + starting + self._usual(task) <= self.end:
                    return task
            return None

    def _usual(self, task: Task) -> float:
        """How long it may well take: as long as it may, or twice what others like it have taken."""
        longest = self._longest.get((task.part, task.compile_only))
        return (
            task.job.seconds
            if longest is None or not PARTS[task.part].predictable
            else min(task.job.seconds, 2 * longest)
        )

    def _ask(self, slot: Slot, task: Task) -> dict[str, Any] | None:
        """What came of a task; None where the command ended first."""
        part, job, compile_only = task
        begun = self.clock.now()
        left = self.end + ENDING_SECONDS - begun
        request = {"part": part, "label": job.label, "compile_only": compile_only}
        try:
            outcome = slot.ask(request, min(job.seconds, left))
        except NoAnswer as reason:
            if self._stopped or (reason.silent and left < job.seconds):
                return None  # the job is not to blame
            hung = f"took longer than {job.seconds:g} s: taken for one that hangs, and ended"
            outcome = {"failed": hung if reason.silent else str(reason), "usable": False}
        outcome["seconds"] = self.clock.now() - begun
        with self._lock:
            self.hangs[job.operation] += not outcome["usable"]
            kind = part, compile_only
            self._longest[kind] = max(self._longest.get(kind, 0.0), outcome["seconds"])
        self._say(task, outcome)
        return outcome

    def _started(self, slot: Slot, part: str) -> bool:
        if self.folder.counts:
            self.clock.sleep(PAUSE_SECONDS)
        begun = self.clock.now()
        try:
            slot.start(min(START_SECONDS, self.end - begun))
        except NoAnswer as reason:
            self.reasons[part] = f"no process to run it: {reason}"
            return False
        with self._lock:
            self.folder.check_device(slot.identity["device"])
            self._usual_start = max(USUAL_START_SECONDS, 1.5 * (self.clock.now() - begun))
        return True

    def _store(self, task: Task, outcome: dict[str, Any], slot: Slot) -> None:
        self.folder.store(task.part, task.job, outcome, slot.identity, outcome["seconds"])

    def _say(self, task: Task, outcome: dict[str, Any]) -> None:
        passed = outcome.get("result", {}).get("passed", True)
        done = "compiled" if task.compile_only else "done" if passed else "WRONG"
        how = f"failed: {outcome['failed']}" if "failed" in outcome else done
        since = self.clock.now() - self.begun
        print(
            f"{since:5.0f} s  {task.part}: {task.job.label}: {how}, {outcome['seconds']:.1f} s",
            flush=True,
        )


def run(
    folder: Folder, parts: Iterable[str], setting: Setting, minutes: float, words: list[str]
) -> dict[str, str]:
    """`Runner.run` with real workers, on all processors."""
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    start = partial(start_worker, setting, words, folder.cache)
    memory = 0.75 if setting.torch_python else 0.9  # the peers are processes of their own
    left = Runner(folder, start, 60 * minutes, processes, memory).run(parts)
    folder.trim_cache()
    return left

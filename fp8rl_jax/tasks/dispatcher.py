"""Gives samples to the worker processes and takes back what became of them, in a thread of its own.

That thread alone touches workers and pending samples, so none of it is locked; other threads hand
it jobs through an inbox and wake it through a socket.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.scores import ScoreJob
from fp8rl_jax.tasks.worker_process import WorkerProcess

_log = logging.getLogger("fp8rl")

START_TIMEOUT = 120.0
MAX_FAILED_STARTS = 3
# A batch keeps a worker busy about this long: few messages for cheap rewards, an even load for slow
# ones.
BATCH_SECONDS = 0.02
FIRST_BATCH = 8
LOG_BYTES = 4 * 2**20


class RewardLog:
    """What the workers print, in a file that is put aside as `<file>.1` whenever it has LOG_BYTES:
    the newest 4 to 8 MiB stay.

    The workers write into a pipe, which is read here: a file of their own could grow without a
    bound. Nothing is made before the first byte comes, and a file that cannot be written is warned
    about once.

    Args:
        path: the file; None: what comes is dropped.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def take(self) -> bool:
        """Takes some of what has come; whether there was anything. Not all of it: a worker may
        print faster than this reads."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return False
        try:
            self._write(data)
        except OSError as fault:
            _log.warning(
                "%s: what rewards print cannot be written (%s), and is dropped",
                self._path,
                fault.strerror,
            )
            self._path = None
        return True

    def close(self) -> None:
        """Takes what is left. The workers have ended."""
        while self.take():
            pass
        os.close(self.reader)
        os.close(self.writer)

    def _write(self, data: bytes) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(data)
            size = file.tell()
        if size >= LOG_BYTES:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))


class Dispatcher:
    """The workers of a task and the thread that serves them.

    Args:
        log: file for what the rewards print; None: it is dropped.
        objects: functions or a class that were given in Python, as `python_objects.pack` gives
            them.

    Attributes:
        ready: done when every worker has imported the reward, or with the UserError that says why
            it cannot.
        workers: those that are alive; a lost one is replaced.
    """

    def __init__(self, task: TaskConfig, log: Path | None = None, objects: bytes = b""):
        self.task = task
        # A file, because a socket holds too little: it would block this thread until the worker has
        # started.
        self._objects = tempfile.TemporaryFile()
        self._objects.write(objects)
        self._objects.flush()
        self.ready: Future[None] = Future()
        self.workers: list[WorkerProcess] = []
        self._lock = threading.Lock()
        self._inbox: list[ScoreJob] = []
        self._fault: BaseException | None = None
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._take_jobs)
        self._printed = RewardLog(log)
        self._selector.register(self._printed.reader, selectors.EVENT_READ, self._printed.take)
        self._jobs: set[ScoreJob] = set()
        self._pending: deque[tuple[ScoreJob, int]] = deque()
        self._failed_starts = 0
        self._sample_seconds = BATCH_SECONDS / FIRST_BATCH
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, job: ScoreJob) -> None:
        """Takes a job; its future gives the scores, or raises what ended the thread.

        Raises:
            UserError: the workers ended and could not be started again.
            RuntimeError: after `close`.
        """
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._inbox.append(job)
            self._wake_sender.send(b".")

    def close(self) -> None:
        """Kills the workers and waits for their end. May be called twice."""
        with self._lock:
            if self._fault is None:
                self._closing = True
                self._wake_sender.send(b".")
        self._thread.join()
        self._wake_sender.close()
        self._wake_receiver.close()

    # Everything below runs in the dispatcher's own thread, and only there.

    def _run(self) -> None:
        fault: BaseException = RuntimeError("the reward pool is closed")
        try:
            for _ in range(self.task.reward.num_workers):
                self._start_worker()
            while not self._closing:
                self._assign()
                deadline = min(worker.deadline for worker in self.workers)
                timeout = None if deadline == math.inf else max(deadline - time.monotonic(), 0)
                for key, _ in self._selector.select(timeout):
                    key.data()
                self._expire()
        except BaseException as raised:  # raised again in every thread that waits for a result
            fault = raised
        finally:
            for worker in self.workers:
                worker.kill()
            self._printed.close()
            self._objects.close()
            with self._lock:
                self._fault = fault
                self._jobs.update(self._inbox)
            for job in self._jobs:
                job.future.set_exception(fault)
            if not self.ready.done():
                self.ready.set_exception(fault)
            self._selector.close()

    def _take_jobs(self) -> None:
        self._wake_receiver.recv(1 << 12)
        with self._lock:
            jobs, self._inbox = self._inbox, []
        for job in jobs:
            self._jobs.add(job)
            self._pending.extend((job, row) for row in range(len(job.samples)))
            self._finish(job)

    def _start_worker(self) -> None:
        worker = WorkerProcess(self.task, self._printed.writer, self._objects.fileno())
        worker.deadline = time.monotonic() + START_TIMEOUT
        self.workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, partial(self._read, worker))

    def _assign(self) -> None:
        for worker in self.workers:
            if worker.ready and not worker.assigned and self._pending:
                most, sharers = int(BATCH_SECONDS / self._sample_seconds), len(self.workers)
                if worker.batches:
                    most, sharers = (
                        self.task.reward.batch_size,
                        sum(not other.assigned for other in self.workers),
                    )
                size = max(1, min(math.ceil(len(self._pending) / sharers), most))
                worker.assigned.extend(self._pending.popleft() for _ in range(size))
                worker.batch_size, worker.batch_started, worker.in_batch = (
                    size,
                    time.monotonic(),
                    worker.batches,
                )
                worker.deadline = worker.batch_started + self._seconds(worker)
                worker.send(
                    [job.samples[row] for job, row in worker.assigned], self.task.reward.timeout
                )

    def _read(self, worker: WorkerProcess) -> None:
        lines, alive = worker.receive()
        for line in lines:
            if not worker.ready:
                self._started(worker, line)
            elif line == "batch":
                worker.in_batch = False
            elif worker.assigned:
                job, row = worker.assigned.popleft()
                job.record(row, *line)
                self._finish(job)
        if lines and worker.assigned:
            worker.deadline = time.monotonic() + self.task.reward.timeout
        elif lines:
            worker.deadline = math.inf
            if worker.batch_size:
                seconds = (time.monotonic() - worker.batch_started) / worker.batch_size
                self._sample_seconds = 0.5 * self._sample_seconds + 0.5 * seconds
        if not alive and worker in self.workers:
            self._lose(worker, timed_out=False)

    def _started(self, worker: WorkerProcess, line: dict) -> None:
        if "failed" in line:  # it exits now, and `_lose` follows
            worker.failure = line["failed"]
            return
        worker.ready, worker.batches = True, line["batches"]
        if line["warning"] and not self.ready.done():
            _log.warning("reward workers: %s", line["warning"])
        self._failed_starts = 0
        if not self.ready.done() and all(other.ready for other in self.workers):
            self.ready.set_result(None)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self.workers if worker.deadline <= now]:
            self._lose(worker, timed_out=True)

    def _seconds(self, worker: WorkerProcess) -> float:
        """What `worker` may take for what it is at: a batch, or one sample."""
        return self.task.reward.timeout * (len(worker.assigned) if worker.in_batch else 1)

    def _lose(self, worker: WorkerProcess, timed_out: bool) -> None:
        """Replace `worker`. The sample or the batch that it was at has failed; the samples behind
        it are scored by another."""
        self._selector.unregister(worker.socket)
        self.workers.remove(worker)
        end = worker.kill()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS or not self.ready.done():
                end = f"took more than {START_TIMEOUT:.0f} s" if timed_out else end
                source = self.task.reward.function or self.task.name
                raise UserError(
                    worker.failure or f"the reward worker {end} while it imported {source!r}"
                )
        error = f"no score after {self._seconds(worker):g} s" if timed_out else f"the worker {end}"
        for _ in range(len(worker.assigned) if worker.in_batch else min(len(worker.assigned), 1)):
            job, row = worker.assigned.popleft()
            job.record(row, None, error, timed_out)
            self._finish(job)
        self._pending.extendleft(reversed(worker.assigned))
        self._start_worker()

    def _finish(self, job: ScoreJob) -> None:
        if job.remaining == 0:
            self._jobs.discard(job)
            job.future.set_result(job.scores())

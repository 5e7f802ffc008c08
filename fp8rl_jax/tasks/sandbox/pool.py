"""Rewards in processes that can be killed.

A reward is somebody's Python: it parses what a half-trained model wrote, with regular expressions
and computer algebra that may never return, and in the trainer's own process it would take the run
with it. A thread cannot be stopped, SIGALRM waits until the C code returns, and a fork of a process
that runs JAX may deadlock. So:

- Workers are fresh interpreters (fork and exec, what multiprocessing calls "spawn", but without the
  second import of the user's `__main__`, which would load JAX into every worker). They live as long
  as the pool.
- Each has a supervisor, which kills it with everything that it started, daemons in other sessions
  too: when a sample outlives its timeout, when there are too many processes, and when the trainer
  ends. What a sample leaves running dies before its score is out. (On Linux; elsewhere a worker's
  process group is killed.)
- Samples travel in batches, results come back one by one: the pool always knows which sample a
  worker is at, so exactly that one is lost, and the rest of its batch goes to the next worker.
- Whatever a reward does wrong (an exception, a result that is no finite number, too much memory,
  too large a file, the end of its process) leaves its sample without a reward, and is counted. The
  run goes on.
- What it prints goes into a file of bounded size.

This isolates faults, not malice: a reward can write files, open sockets, and kill its supervisor,
unless task.reward.sandbox is "strict" (`strict`). docs/sandbox.md says what holds when.
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
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.python_objects import PythonReward, check_objects, name_objects
from fp8rl_jax.tasks.rewards import LARGEST
from fp8rl_jax.tasks.sandbox import strict
from fp8rl_jax.tasks.sandbox.answers import BATCH, AnswerFault, read_answer, read_start
from fp8rl_jax.tasks.sandbox.pickling import pack
from fp8rl_jax.tasks.sandbox.worker_process import WorkerProcess, worker_environment
from fp8rl_jax.tasks.scores import Scores, metrics_of

_log = logging.getLogger("fp8rl")

_START_TIMEOUT = 120.0
# A worker that replaces another may take this times as long as the slowest before it, and at least
# so many seconds.
_START_AGAIN, _LEAST_START = 4, 20.0
_MAX_FAILED_STARTS = 3
_MIN_HANGS = 4
# A batch keeps a worker busy about this long: few messages for cheap rewards, an even load for slow
# ones.
_BATCH_SECONDS = 0.02
_FIRST_BATCH = 8
LOG_BYTES = 4 * 2**20


class RewardPool:
    """Worker processes that score completions.

        with RewardPool(config.task) as pool:
            scores = pool.score(examples, completions)

    The constructor starts the workers and returns at once, so that their imports overlap with
    whatever comes next. Entering the context, or `wait_until_ready`, raises UserError where the
    reward does not import or cannot be called as one. `close` leaves no process behind; nor does
    the end of this process, however it comes (on Linux).

    Args:
        task: its rewards are scored.
        log: file that what the rewards print is added to, made when the first of them does; None:
            it is dropped.
        reward: a function, or {name: function}, in place of what `task` names; of a notebook cell
            or a closure, too. It is copied as it is now, with the variables that it uses, and
            called as fp8rl_jax/tasks/rewards.py says.
        environment: class, in place of the one that `task` names; copied likewise.
        columns: columns of the problems, which rewards may have parameters for (`columns_of`).

    Raises:
        UserError: a value of the configuration cannot work, or what was given in Python cannot be
            sent to another process.
    """

    def __init__(
        self,
        task: TaskConfig,
        log: Path | None = None,
        reward: PythonReward | None = None,
        environment: type | None = None,
        columns: Sequence[str] = (),
    ):
        task, objects = name_objects(task, reward, environment=environment)
        if faults := task.problems():
            raise UserError("; ".join(faults))
        check_objects(task, objects)
        if task.reward.sandbox == "strict" and (lacks := strict.missing()):
            raise UserError(
                f'task.reward.sandbox = "strict" needs {lacks}; set sandbox = "process", which '
                "isolates faults and not malice"
            )
        worker_environment(task.reward)
        self.task = task
        self._dispatcher = Dispatcher(task, log, pack(objects), columns)

    def wait_until_ready(self) -> None:
        """Wait until every worker has imported the reward.

        Raises:
            UserError: the reward does not import or cannot be called as a reward; the pool is
                closed then.
        """
        try:
            self._dispatcher.ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, examples: Sequence[Example], completions: Sequence[str]) -> Future[Scores]:
        """Score in the background; the future gives or raises what `score` would."""
        if (not examples and completions) or (examples and len(completions) % len(examples)):
            raise ValueError(
                f"{len(completions)} completions are no multiple of {len(examples)} examples"
            )
        repeats = len(completions) // max(len(examples), 1)
        pairs = [
            (examples[row // repeats], completion) for row, completion in enumerate(completions)
        ]
        if not self.task.is_environment:
            return self._submit(
                [(example.prompt, text, example.answer, example.entry) for example, text in pairs]
            )
        if self.task.max_turns > 1:
            raise UserError(
                f"task.max_turns = {self.task.max_turns}: one turn a problem is played here; set "
                "it to 1"
            )
        return self._submit([(example.entry, (), text) for example, text in pairs])

    def play(self, episodes: Sequence[Episode], completions: Sequence[str | None]) -> Scores:
        """Play the next turn of every episode: completion b is what the model says in episode b.

        Where it is None the episode of an environment of `verifiers` ends for want of room, and is
        scored.

        Returns:
            Scores of this turn; `turns` says what it led to, None where it failed.

        Raises:
            UserError: the workers ended and could not be started again.
        """
        pairs = zip(episodes, completions, strict=True)
        return self._submit(
            [(episode.example.entry, episode.history, text) for episode, text in pairs]
        ).result()

    def _submit(self, samples: list[tuple[Any, ...]]) -> Future[Scores]:
        job = ScoreJob(samples, self.task)
        self._dispatcher.submit(job)
        return job.future

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        """Score `completions` [B]; completion b answers example b // (B / len(examples)).

        Raises:
            UserError: the workers ended and could not be started again.
        """
        return self.submit(examples, completions).result()

    def close(self) -> None:
        """Kill the workers and wait for their end. May be called twice.

        Scores still under way raise RuntimeError.
        """
        self._dispatcher.close()

    def __enter__(self) -> RewardPool:
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScoreJob:
    """The samples of one call and what is known of their scores."""

    def __init__(self, samples: list[tuple[Any, ...]], task: TaskConfig):
        self.future: Future[Scores] = Future()
        self.future.set_running_or_notify_cancel()
        self.samples = samples
        self.weights = task.components
        self.deciding = list(self.weights).index(task.deciding_reward)
        self.partial_credit = task.reward.partial_credit
        self.started = time.monotonic()
        self.remaining = len(samples)
        self.values = np.zeros((len(samples), len(self.weights)), np.float64)
        self.turns: list[dict[str, Any] | None] = (
            [None] * len(samples) if task.is_environment else []
        )
        self.failed = np.zeros(len(samples), bool)
        self.timeouts = 0
        self.first_error = ""

    def record(self, row: int, result: Any, error: str | None, timed_out: bool = False) -> None:
        """Record the scores of sample `row`, or an environment's turn, or what went wrong.

        Scores stand in the order of the weights.
        """
        scores = [result["reward"]] if isinstance(result, dict) else result
        self.remaining -= 1
        if error is None and abs(np.dot(scores, list(self.weights.values()))) > LARGEST:
            error = f"the weighted sum of the rewards is more than {LARGEST:g}"
        if error is None:
            self.values[row] = scores
            if self.turns:
                self.turns[row] = result
        else:
            self.failed[row] = True
            self.timeouts += timed_out
            self.first_error = self.first_error or error

    def scores(self) -> Scores:
        """Return the result; every sample must have been recorded."""
        # Compared in float64: float32 would round 0.99999999 to 1.
        correct = (self.values[:, self.deciding] >= 1.0) & ~self.failed
        summed = self.values.copy()
        if not self.partial_credit:
            summed[:, self.deciding] = correct
        return Scores(
            rewards=(summed @ list(self.weights.values())).astype(np.float32),
            components=metrics_of(self.turns)
            | {name: self.values[:, i].astype(np.float32) for i, name in enumerate(self.weights)},
            correct=correct,
            failed=self.failed,
            errors=int(self.failed.sum()) - self.timeouts,
            timeouts=self.timeouts,
            first_error=self.first_error,
            seconds=time.monotonic() - self.started,
            turns=self.turns,
        )


class Dispatcher:
    """The workers of a task and the thread that gives them samples and takes back results.

    That thread alone touches workers and pending samples, so none of it is locked; other threads
    hand it jobs through an inbox and wake it through a socket.

    Args:
        log: file for what the rewards print; None: it is dropped.
        objects: functions or a class that were given in Python, as `pickling.pack` gives
            them.

    Attributes:
        ready: done when every worker has imported the reward, or with the UserError that says why
            it cannot.
        workers: those that are alive; a lost one is replaced.
    """

    def __init__(
        self,
        task: TaskConfig,
        log: Path | None = None,
        objects: bytes = b"",
        columns: Sequence[str] = (),
    ):
        self.task = task
        # A file, because a socket holds too little: it would block this thread until the worker has
        # started.
        self._columns = tuple(columns)
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
        self._slowest_start = 0.0
        # lost to a timeout before any worker has ever answered; None once one has
        self._hangs: int | None = 0
        self._sample_seconds = _BATCH_SECONDS / _FIRST_BATCH
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, job: ScoreJob) -> None:
        """Take a job; its future gives the scores, or raises what ended the thread.

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
        """Kill the workers and wait for their end. May be called twice."""
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
        worker = WorkerProcess(
            self.task, self._printed.writer, self._objects.fileno(), self._columns
        )
        worker.deadline = worker.started + self._start_timeout
        self.workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, partial(self._read, worker))

    def _assign(self) -> None:
        for worker in self.workers:
            if worker.ready and not worker.assigned and self._pending:
                most, sharers = int(_BATCH_SECONDS / self._sample_seconds), len(self.workers)
                if worker.batches:
                    # A first call of one row: one that hangs has its timeout, and not the whole
                    # batch's.
                    most, sharers = (
                        self.task.reward.batch_size if worker.proven else 1,
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

    @property
    def _start_timeout(self) -> float:
        if not self.ready.done():
            return _START_TIMEOUT
        return min(max(_START_AGAIN * self._slowest_start, _LEAST_START), _START_TIMEOUT)

    def _read(self, worker: WorkerProcess) -> None:
        lines, alive = worker.receive()
        try:
            for line in lines:
                self._take(worker, line)
            if worker.is_overfull:
                raise AnswerFault("sent more than an answer may have")
        except AnswerFault as fault:
            self._lose(worker, timed_out=False, fault=str(fault))
            return
        if lines and worker.assigned:
            worker.deadline = time.monotonic() + self.task.reward.timeout
        elif lines:
            worker.deadline = math.inf
            if worker.batch_size:
                seconds = (time.monotonic() - worker.batch_started) / worker.batch_size
                self._sample_seconds = 0.5 * self._sample_seconds + 0.5 * seconds
        if not alive and worker in self.workers:
            self._lose(worker, timed_out=False)

    def _take(self, worker: WorkerProcess, line: bytes) -> None:
        """Take one line of what a worker says."""
        if not worker.ready:
            self._started(worker, line)
            return
        components = None if self.task.is_environment else len(self.task.components)
        answer = read_answer(line, components)
        if not worker.assigned or (answer == BATCH) != worker.in_batch:
            raise AnswerFault("answered what it was not asked")
        worker.proven, self._hangs = True, None
        if answer == BATCH:
            worker.in_batch = False
            return
        job, row = worker.assigned.popleft()
        job.record(row, *answer)
        self._finish(job)

    def _started(self, worker: WorkerProcess, line: bytes) -> None:
        start = read_start(line)
        if start.failed:  # it exits now, and `_lose` follows
            worker.failure = start.failed
            return
        worker.ready, worker.batches = True, start.batches
        self._slowest_start = max(self._slowest_start, time.monotonic() - worker.started)
        if start.warning and not self.ready.done():
            _log.warning("reward workers: %s", start.warning)
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

    def _lose(self, worker: WorkerProcess, timed_out: bool, fault: str = "") -> None:
        """Replace `worker`. The sample or the batch that it was at has failed; the samples behind
        it are scored by another.

        Raises:
            UserError: no worker starts, or none has ever answered.
        """
        self._selector.unregister(worker.socket)
        self.workers.remove(worker)
        start_timeout = self._start_timeout
        end = worker.kill()
        end = fault or end
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS or not self.ready.done():
                end = f"took more than {start_timeout:.0f} s" if timed_out else end
                source = self.task.reward.function or self.task.name
                raise UserError(
                    worker.failure or f"the reward worker {end} while it imported {source!r}"
                )
        elif timed_out and self._hangs is not None:
            self._hangs += 1
            if self._hangs >= max(_MIN_HANGS, 2 * self.task.reward.num_workers):
                raise UserError(
                    f"the rewards hang: {self._hangs} workers were killed at their first sample, "
                    "and none has ever given a score; mend the reward, or raise "
                    f"task.reward.timeout = {self.task.reward.timeout:g} if it is slow at first"
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


class RewardLog:
    """What the workers print, in a file of which the newest 4 to 8 MiB stay.

    It is put aside as `<file>.1` whenever it has LOG_BYTES. The workers write into a pipe, which is
    read here: a file of their own could grow without a bound. Nothing is made before the first byte
    comes, and a file that cannot be written is warned about a single time.

    Args:
        path: the file; None: what comes is dropped.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def take(self) -> bool:
        """Take some of what has come; returns whether there was anything.

        Not all of it: a worker may print faster than this reads.
        """
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
        """Take what is left. The workers have ended."""
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

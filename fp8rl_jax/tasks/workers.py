"""Rewards in processes that can be killed.

A reward is somebody's Python: it parses what a half-trained model wrote, with regular expressions and computer algebra
that may never return, and in the trainer's own process it would take the run with it. A thread cannot be stopped,
SIGALRM waits until the C code returns, and a fork of a process that runs JAX may deadlock. So:

- Workers are fresh interpreters (fork and exec, what multiprocessing calls "spawn", but without the second import of
  the user's `__main__`, which would load JAX into every worker). They live as long as the pool.
- Each has a supervisor, which kills it with everything that it started, daemons in other sessions too: when a sample
  outlives its timeout, when there are too many processes, and when the trainer ends. What a sample leaves running
  dies before its score is out. (On Linux; elsewhere a worker's process group is killed.)
- Samples travel in batches, results come back one by one: the pool always knows which sample a worker is at, so exactly
  that one is lost, and the rest of its batch goes to the next worker.
- Whatever a reward does wrong (an exception, a result that is no finite number, too much memory, too large a file, the
  end of its process) is reward 0 for its sample, and counted. The run goes on.

This isolates faults; it is no sandbox. A reward can read files, open sockets, and kill its supervisor.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.scores import ScoreJob, Scores
from fp8rl_jax.tasks.worker_process import WorkerProcess

_log = logging.getLogger("fp8rl")

START_TIMEOUT = 120.0
MAX_FAILED_STARTS = 3
# A batch keeps a worker busy about this long: few messages for cheap rewards, an even load for slow ones.
BATCH_SECONDS = 0.02
FIRST_BATCH = 8


class RewardPool:
    """Worker processes that score completions.

        with RewardPool(config.task) as pool:
            scores = pool.score(examples, completions)

    The constructor starts the workers and returns at once, so that their imports overlap with whatever comes next.
    Entering the context, or `wait_until_ready`, raises UserError where the reward does not import or cannot be called
    as one. `close` leaves no process behind; nor does the end of this process, however it comes (on Linux).
    """

    def __init__(self, task: TaskConfig):
        if faults := task.problems():
            raise UserError("; ".join(faults))
        self.task = task
        self._lock = threading.Lock()
        self._inbox: list[ScoreJob] = []
        self._fault: BaseException | None = None
        self._ready: Future[None] = Future()
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._take_jobs)
        self._workers: list[WorkerProcess] = []
        self._jobs: set[ScoreJob] = set()
        self._pending: deque[tuple[ScoreJob, int]] = deque()
        self._failed_starts = 0
        self._sample_seconds = BATCH_SECONDS / FIRST_BATCH
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Wait until every worker has imported the reward.

        Raises:
            UserError: the reward does not import or cannot be called as a reward; the pool is closed then.
        """
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, examples: Sequence[Example], completions: Sequence[str]) -> Future[Scores]:
        """Score in the background; the future gives or raises what `score` would."""
        if (not examples and completions) or (examples and len(completions) % len(examples)):
            raise ValueError(f"{len(completions)} completions are no multiple of {len(examples)} examples")
        repeats = len(completions) // max(len(examples), 1)
        pairs = [(examples[row // repeats], completion) for row, completion in enumerate(completions)]
        if self.task.kind != "environment":
            return self._submit([(example.prompt, text, example.answer, example.entry) for example, text in pairs])
        if self.task.max_turns > 1:
            raise UserError(f"task.max_turns = {self.task.max_turns}: one turn a problem is played here; set it to 1")
        return self._submit([(example.entry, (), text) for example, text in pairs])

    def play(self, episodes: Sequence[Episode], completions: Sequence[str]) -> Scores:
        """Play the next turn of every episode: completion b is what the model says in episode b.

        Returns:
            Scores of this turn; `turns` says what it led to, None where it failed.

        Raises:
            UserError: the workers ended and could not be started again.
        """
        pairs = zip(episodes, completions, strict=True)
        return self._submit([(episode.example.entry, episode.history, text) for episode, text in pairs]).result()

    def _submit(self, samples: list[tuple[Any, ...]]) -> Future[Scores]:
        job = ScoreJob(samples, self.task)
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._inbox.append(job)
            self._wake_sender.send(b".")
        return job.future

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        """Score `completions` [B]; completion b answers example b // n, where n = B / len(examples).

        Raises:
            UserError: the workers ended and could not be started again.
        """
        return self.submit(examples, completions).result()

    def close(self) -> None:
        """Kill the workers and wait for their end. Scores still under way raise RuntimeError. May be called twice."""
        with self._lock:
            if self._fault is None:
                self._closing = True
                self._wake_sender.send(b".")
        self._thread.join()
        self._wake_sender.close()
        self._wake_receiver.close()

    def __enter__(self) -> RewardPool:
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Everything below runs in the pool's own thread, and only there.

    def _run(self) -> None:
        fault: BaseException = RuntimeError("the reward pool is closed")
        try:
            for _ in range(self.task.reward.num_workers):
                self._start_worker()
            while not self._closing:
                self._assign()
                deadline = min(worker.deadline for worker in self._workers)
                timeout = None if deadline == math.inf else max(deadline - time.monotonic(), 0)
                for key, _ in self._selector.select(timeout):
                    key.data()
                self._expire()
        except BaseException as raised:  # raised again in every thread that waits for a result
            fault = raised
        finally:
            for worker in self._workers:
                worker.kill()
            with self._lock:
                self._fault = fault
                self._jobs.update(self._inbox)
            for job in self._jobs:
                job.future.set_exception(fault)
            if not self._ready.done():
                self._ready.set_exception(fault)
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
        worker = WorkerProcess(self.task)
        worker.deadline = time.monotonic() + START_TIMEOUT
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, partial(self._read, worker))

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.assigned and self._pending:
                even = math.ceil(len(self._pending) / len(self._workers))
                size = max(1, min(even, int(BATCH_SECONDS / self._sample_seconds)))
                worker.assigned.extend(self._pending.popleft() for _ in range(size))
                worker.batch_size, worker.batch_started = size, time.monotonic()
                worker.deadline = worker.batch_started + self.task.reward.timeout
                worker.send([job.samples[row] for job, row in worker.assigned], self.task.reward.timeout)

    def _read(self, worker: WorkerProcess) -> None:
        lines, alive = worker.receive()
        for line in lines:
            if not worker.ready:
                self._started(worker, line)
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
        if not alive and worker in self._workers:
            self._lose(worker, timed_out=False)

    def _started(self, worker: WorkerProcess, line: dict) -> None:
        if "failed" in line:  # it exits now, and `_lose` follows
            worker.failure = line["failed"]
            return
        worker.ready = True
        if line["warning"] and not self._ready.done():
            _log.warning("reward workers: %s", line["warning"])
        self._failed_starts = 0
        if not self._ready.done() and all(other.ready for other in self._workers):
            self._ready.set_result(None)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            self._lose(worker, timed_out=True)

    def _lose(self, worker: WorkerProcess, timed_out: bool) -> None:
        """Replace `worker`. The sample that it was at has failed; those behind it are scored by another."""
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        end = worker.kill()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS or not self._ready.done():
                end = f"took more than {START_TIMEOUT:.0f} s" if timed_out else end
                source = self.task.reward.function or self.task.name
                raise UserError(worker.failure or f"the reward worker {end} while it imported {source!r}")
        if worker.assigned:
            job, row = worker.assigned.popleft()
            error = f"no score after {self.task.reward.timeout:g} s" if timed_out else f"the worker {end}"
            job.record(row, None, error, timed_out)
            self._finish(job)
        self._pending.extendleft(reversed(worker.assigned))
        self._start_worker()

    def _finish(self, job: ScoreJob) -> None:
        if job.remaining == 0:
            self._jobs.discard(job)
            job.future.set_result(job.scores())

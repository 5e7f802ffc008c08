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
  too large a file, the end of its process) is reward 0 for its sample, and counted. The run goes
  on.
- What it prints goes into a file of bounded size.

This isolates faults; it is no sandbox. A reward can read files, open sockets, and kill its
supervisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.dispatcher import Dispatcher
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.python_objects import PythonReward, check_objects, name_objects, pack
from fp8rl_jax.tasks.scores import ScoreJob, Scores


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
    ):
        task, objects = name_objects(task, reward, environment=environment)
        if faults := task.problems():
            raise UserError("; ".join(faults))
        check_objects(task, objects)
        self.task = task
        self._dispatcher = Dispatcher(task, log, pack(objects))

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
        if self.task.kind != "environment":
            return self._submit(
                [(example.prompt, text, example.answer, example.entry) for example, text in pairs]
            )
        if self.task.max_turns > 1:
            raise UserError(
                f"task.max_turns = {self.task.max_turns}: one turn a problem is played here; set "
                "it to 1"
            )
        return self._submit([(example.entry, (), text) for example, text in pairs])

    def play(self, episodes: Sequence[Episode], completions: Sequence[str]) -> Scores:
        """Play the next turn of every episode: completion b is what the model says in episode b.

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
        """Score `completions` [B]; completion b answers example b // n, where n = B /
        len(examples).

        Raises:
            UserError: the workers ended and could not be started again.
        """
        return self.submit(examples, completions).result()

    def close(self) -> None:
        """Kill the workers and wait for their end. Scores still under way raise RuntimeError. May
        be called twice."""
        self._dispatcher.close()

    def __enter__(self) -> RewardPool:
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

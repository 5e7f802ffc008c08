"""A run around a session: problems and their rewards in, metrics, samples, checkpoints and the
trained model out.

A step samples, scores in worker processes, and updates; session.py says what happens inside.
Held-out problems are evaluated and checkpoints written on the way. A checkpoint holds weights,
optimizer, KV scales, and the loss scale and clip bounds where they are found on the way, and
everything random is a function of (seed, step), so a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import rl
from fp8rl_jax.config.fingerprint import FREE, changes, is_free
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import Interrupted, UserError, switch
from fp8rl_jax.parallel import (
    PROGRESS,
    check_same,
    is_main_process,
    leave_on_failure,
    mesh_text,
    shared_faults,
    sum_over_processes,
    to_host,
)
from fp8rl_jax.rollout.engine import Prompts, Rollout
from fp8rl_jax.tasks.dataset import Dataset
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.acceptance import Acceptance
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.collect import Collected, Collector
from fp8rl_jax.training.console import COLUMNS
from fp8rl_jax.training.evaluation import evaluate
from fp8rl_jax.training.keys import sample_key
from fp8rl_jax.training.plan import out_of_memory
from fp8rl_jax.training.record import note, owned, read_record, write_run_record
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import (
    Setup,
    announce,
    check_answers,
    opening,
    reward_log,
    reward_pool,
)
from fp8rl_jax.training.source import checkpoint_steps
from fp8rl_jax.training.step_ahead import StepAhead
from fp8rl_jax.training.stopping import Asked, Stopping, stopping
from fp8rl_jax.training.tracking import (
    Callback,
    JsonLines,
    Trackers,
    make_tracker,
    rows_of,
)
from fp8rl_jax.training.watch import Watch

_log = logging.getLogger("fp8rl")

Explain = Callable[[Session, Rollout], str]
"""Says where trainer and rollout part on a rollout's tokens, under the session's present
weights."""


def train(setup: Setup, explain: Explain | None = None, callbacks: Sequence[Callback] = ()) -> None:
    """Run `trainer.steps` steps.

    Leaves metrics, samples, evaluations, checkpoints and the trained model in the run directory.

    Args:
        explain: called where a bit differs in a run in exact mode.
        callbacks: called with each row of metrics.jsonl, in the process that writes it; one that
            returns True ends the run behind that step, with a checkpoint and the model.

    Raises:
        UserError: the run directory is taken, a checkpoint cannot be written or read, too many
            updates were skipped, or every reward failed in too many steps.
    """
    config = setup.config
    check_config(config)
    with leave_on_failure(), jax.set_mesh(setup.session.mesh), ExitStack() as stack:
        with shared_faults():
            if is_main_process():
                stack.enter_context(owned(setup.directory))
                refuse_taken(setup)
            pool = stack.enter_context(reward_pool(setup))
        if is_main_process():
            announce(setup, print, "rollout.prompts_per_step")
            print("\n".join(opening(setup)), flush=True)
        with shared_faults():
            if is_main_process():
                check_answers(setup, pool)
            loop = Loop(setup, pool, explain, callbacks)
        if loop.is_finished():
            return
        with shared_faults():
            loop.open_records()
        loop.run()


def check_config(config: RunConfig) -> None:
    """Check that all processes have this configuration.

    Raises:
        UserError: as `check_same`.
    """
    check_same(
        repr(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, process_id=-1)))
    )


def refuse_taken(setup: Setup) -> None:
    """Refuse a directory that holds a run which is not to be resumed.

    Raises:
        UserError: it does.
    """
    if not setup.config.resume and holds_run(setup.directory):
        raise UserError(
            f"{setup.directory} holds a run already; give {switch('resume')}, or another output"
        )


ROWS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")
"""Files that a run adds lines to."""


def holds_run(directory: Path) -> bool:
    """Say whether a run has left anything here; one that failed at its start has not."""
    written = (path for path in map(directory.joinpath, ROWS) if path.exists())
    return any(path.stat().st_size for path in written) or bool(checkpoint_steps(directory))


class Loop:
    """A run in progress: what surrounds its steps, and the steps of reinforcement learning.

    Those of another kind of training take the place of the methods behind `_standing`.
    """

    columns, free, supervised = COLUMNS, FREE, False

    def __init__(
        self,
        setup: Setup,
        pool: RewardPool | None,
        explain: Explain | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        self.explain, self.callbacks = explain, callbacks
        self.setup, self.config, self.session, self.pool = setup, setup.config, setup.session, pool
        self.ahead: StepAhead | None = None
        config = setup.config
        self.prepare()
        self.checkpoints = Checkpoints(setup.directory / "checkpoints", config.checkpoint)
        self.watch = Watch(
            config.trainer,
            self.checkpoints.directory,
            config.compute_dtype,
            reward_log(setup),
            self.supervised,
        )
        # where the arrays are, whoever has found it: -1 and a launcher's count are no answer
        self.settings = setup.fingerprint() | {"mesh": mesh_text(self.session.mesh)}
        self.changed: list[str] = []
        if config.resume and self.checkpoints.agreed():
            self.load_saved(*self.checkpoints.restore(self.saved(), self._agree))
            _log.info("resuming at step %d from %s", self.session.step, self.checkpoints.directory)
        elif config.resume:
            _log.warning("%s has no checkpoint yet: starting at step 0", setup.directory)
        self.start, self.inexact = self.session.step, False
        self.newest = self.start
        self.tracker, self.samples, self.evaluations = Trackers([]), None, None

    def is_finished(self) -> bool:
        """Say whether all steps, the last evaluation and the model are there; then say so."""
        steps, directory = self.steps, self.setup.directory
        whole = (
            self.start == steps
            and is_main_process()
            and read_record(directory).get("finished") == steps
            and (
                not self.evaluates
                or steps in {row["step"] for row in rows_of(directory / "metrics.jsonl")}
            )
        )
        # told to all: a process that came late would read the record of this very start
        if finished := bool(sum_over_processes(np.int32(whole))):
            _log.info("%s is finished: nothing is left to do", directory)
            self.checkpoints.close()
        return finished

    def open_records(self) -> None:
        """Write the run's record, and open the files that its rows go to.

        Raises:
            UserError: they cannot be written, or a checkpoint does not fit on the disk.
        """
        setup, config = self.setup, self.config
        if is_main_process():
            self.checkpoints.check_space(self.saved())
            write_run_record(config, self.supervised, self.changed)
            self.tracker = make_tracker(
                setup.directory,
                config.tracking,
                total_steps=self.steps,
                start_step=self.start,
                settings=dataclasses.asdict(config),
                columns=self.columns,
                callbacks=self.callbacks,
            )
            self.watch.recall(rows_of(setup.directory / "metrics.jsonl"))
            self.open_samples()

    def _agree(self, step: int, before: dict[str, Any]) -> None:
        """Compare a checkpoint's settings with this run's.

        Raises:
            UserError: the experiment would be another, and resume_changed does not allow it.
        """
        if not before:  # of a session, or written before there were any
            return
        shared = {
            key: value
            for key, value in self.settings.items()
            if key in before or key.startswith(("file ", "object "))
        }
        before = {key: value for key, value in before.items() if key in shared}
        self.changed = changes(before, shared)
        other = [
            line
            for key in dict.fromkeys([*before, *shared])
            if not is_free(key, self.settings, self.free)
            for line in changes(
                {key: before[key]} if key in before else {},
                {key: shared[key]} if key in shared else {},
            )
        ]
        if other and not self.config.resume_changed:
            raise UserError(
                "\n".join(
                    f"{line}: the checkpoint of step {step} is of another experiment; resume with "
                    f"what it had, or give {switch('resume_changed')}"
                    for line in other
                )
            )
        for line in self.changed:
            _log.warning("resumed with a change: %s", line)

    def run(self) -> None:
        config, session = self.config, self.session
        steps, every = self.steps, config.checkpoint.every
        due = False
        try:
            with (
                self._memory(),
                stopping(config.checkpoint.grace_seconds, self._standing) as stop,
            ):
                try:
                    with stop.at_once(_alone()):
                        self.begin()
                except Asked:
                    self._leave(stop, self.start, None)
                for step in range(self.start, steps):
                    PROGRESS.begin(step)
                    # what a step that is given up leaves as it was
                    held = self.saved()
                    try:
                        with stop.at_once(_alone()):
                            # every row is written before the checkpoint that makes a resumed run go
                            # on behind it
                            metrics, found = self._evaluate(step), self.collect(step)
                    except Asked:
                        self._leave(stop, step, held)
                    if _asked(stop):
                        self._leave(stop, step, held)
                    del held
                    metrics |= self._step(step, found, metrics)
                    # time/* and perf/* since the last row: the step itself, its evaluation, and the
                    # checkpoint before it
                    with PROGRESS.enter("log"):
                        self.log(step, metrics | session.lap())
                    if self._is_ended():
                        steps = step + 1
                    due = due or bool(every and (step + 1) % every == 0)
                    # weights that a step could not learn from are no place to go on from
                    if step + 1 == steps or (due and not self.watch.skipping):
                        self._save(step + 1, self.saved())
                        due = False
                    if step + 1 == steps:
                        break
                    if _asked(stop):
                        self._leave(stop, step + 1, self.saved())
            PROGRESS.begin(steps)
            # a run that was killed behind its last checkpoint has no row of it either
            if self.evaluates and (evaluation := self._evaluate(steps)):
                self.tracker.log(steps, evaluation)
            self.save_model()
            with shared_faults():
                if is_main_process():
                    self._sync_rows()
                    if steps == self.steps:
                        note(self.setup.directory, {"finished": steps})
            if steps < self.steps:
                _log.info("ended behind step %d by a callback; %s", steps - 1, self._standing())
        finally:
            if self.ahead is not None:
                self.ahead.close()
            self.tracker.close()
            for file in (self.samples, self.evaluations):
                if file is not None:
                    file.close()
            self.checkpoints.close()

    @contextmanager
    def _memory(self) -> Generator[None]:
        """Say what to set where the device has no memory left.

        Raises:
            UserError: in place of XLA's error.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            session = self.session
            advice = out_of_memory(session.shape, self.config, dict(session.mesh.shape))
            raise UserError(
                f"out of memory in step {PROGRESS.step}: {' '.join(str(error).split())[:200]}; "
                f"{advice}; {self._standing()}"
            ) from error

    def _save(self, step: int, tree: tuple) -> None:
        """Write a checkpoint, behind the rows of the steps before it."""
        with self.session.clock.enter("ckpt"):
            with shared_faults():
                if is_main_process():
                    self._sync_rows()
            self.checkpoints.save(step, tree, self.settings)
        self.newest = step

    def _sync_rows(self) -> None:
        for file in (self.tracker, self.samples, self.evaluations):
            if file is not None:
                file.sync()

    def _is_ended(self) -> bool:
        """Say whether a callback has ended the run; all processes call it together."""
        if not self.callbacks:
            return False
        return bool(sum_over_processes(np.int32(self.tracker.is_ended)))

    def _leave(self, stop: Stopping, step: int, tree: tuple | None) -> NoReturn:
        """End the run before `step`, with a checkpoint where steps were made since the newest.

        Raises:
            Interrupted: always.
        """
        if tree is not None and step > self.newest:
            self._save(step, tree)
        told = stop.asked or "another process was asked to stop"
        raise Interrupted(f"{told}: stopped before step {step}; {self._standing()}")

    def _standing(self) -> str:
        """How the run goes on."""
        at = f"from the checkpoint of step {self.newest}" if self.newest else "from the start"
        return f"{switch('resume')} goes on {at}"

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.trainer.steps

    def prepare(self) -> None:
        """Make what steps are made with, before a checkpoint is read."""
        assert isinstance(self.setup.train, Dataset) and self.pool is not None
        shared = self.session, self.setup.train, self.pool, self.config
        self.collector, self.acceptance = Collector(*shared), Acceptance(*shared)
        if self.config.rollout.steps_ahead:
            self.ahead = StepAhead(self.session, self.collector, self.config)

    def saved(self) -> tuple:
        """Give what a checkpoint holds."""
        beside = () if self.ahead is None else (self.ahead.saved(),)
        return *self.session.saved(), *beside

    def load_saved(self, step: int, saved: tuple) -> None:
        """Go on at `step` with what `saved` gave."""
        if self.ahead is None:
            self.session.load_saved(step, saved)
        else:
            self.session.load_saved(step, saved[:-1])
            self.ahead.load(saved[-1])

    def open_samples(self) -> None:
        """Open the files that stand beside metrics.jsonl."""
        self.samples = JsonLines(self.setup.directory / "samples.jsonl", self.start)
        self.evaluations = JsonLines(self.setup.directory / "evaluations.jsonl", self.start)

    def begin(self) -> None:
        """Do what comes before the first step."""
        self.session.sync(self._prompts_after(self.start - 1))

    def collect(self, step: int) -> Any:
        """Gather what a step learns from; it changes nothing that a checkpoint has."""
        return (self.ahead or self.collector).collect(step)

    def _prompts_after(self, step: int) -> Prompts:
        """What the weights that `step` leaves sample first: they calibrate an FP8 cache on it."""
        ahead = self.config.rollout.steps_ahead if step >= 0 else 0
        return self.collector.prompts(step + 1 + ahead)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record a step."""
        self.tracker.log(step, metrics)

    @property
    def evaluates(self) -> bool:
        """Whether there is an evaluation behind the last step."""
        return bool(self.config.evaluation.every)

    def save_model(self) -> None:
        """Write what was trained."""
        directory = self.setup.directory
        self.session.save(directory / "model", adapters=directory / "adapter")

    def _step(self, step: int, found: Any, before: dict[str, float]) -> dict[str, float]:
        """Learn from what was sampled; `before`: what the step has measured already."""
        judged = self.config.rl.acceptance.enabled
        held, prompts = self.session.hold() if judged else None, self._prompts_after(step)
        if self.ahead is not None and step + 1 < self.steps:
            self.ahead.begin(step + 1)
        metrics = self.session.update(found.experience, found.chosen, found.entering, prompts)
        if held is not None:
            metrics |= self.acceptance.judge(step, held, prompts)
        if self.session.recipe.exact and not self.inexact:
            largest = metrics["mismatch/logprob_abs_diff_max"]
            self._check_exact(step, largest, found.experience.rollout)
        metrics |= self._scored(found.scores)
        metrics |= {
            "rollout/rounds": float(found.rounds),
            "rollout/teaching_prompts": float(found.informative.sum()),
        }
        metrics["rollout/dropped"] = float(self.setup.dropped)
        if self.samples is not None:
            rows = list(found.shown(self.config.tracking.samples))
            self.samples.write({"step": step, **row} for row in rows)
            if "eval/accuracy" in before:
                self.tracker.show(step, rows)
        healthy = not self.watch.skipping
        try:
            metrics |= self.watch.see(step, metrics, found.scores)
        except UserError as error:
            self.tracker.log(step, before | metrics | self.session.lap())
            good = self.checkpoints.known_good
            raise UserError(
                f"{error}; last known good checkpoint: {'none' if good is None else f'step {good}'}"
            ) from None
        if self.watch.skipping and healthy:
            self._keep_batch(step, found)
        elif not self.watch.skipping:
            self.checkpoints.mark_good()
        return metrics

    def _keep_batch(self, step: int, found: Collected) -> None:
        """Write what the first of skipped updates was to learn from, for a look at it."""
        rollout = found.experience.rollout
        names = ("tokens", "mask", "behaviour_logprobs", "policy_logprobs")
        arrays = {name: to_host(getattr(rollout, name)) for name in names}
        prompts = to_host(rollout.prompts)
        path = self.setup.directory / f"skipped-step-{step}.npz"
        with shared_faults():
            if not is_main_process():
                return
            try:
                np.savez_compressed(
                    path,
                    prompts=prompts.tokens,
                    prompt_lengths=prompts.lengths,
                    rewards=found.chosen.rewards,
                    texts=np.array(found.experience.texts),
                    **arrays,
                )
            except OSError as error:
                raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        _log.warning("step %d: its batch is kept in %s", step, path)

    def _check_exact(self, step: int, difference: float, rollout: Rollout) -> None:
        """Look whether the two sides of an exact run differ.

        Raises:
            UserError: they do, and precision.exact is true; where it is "auto", the run is marked.
        """
        if difference == 0:
            return
        found = (
            f"in step {step} a log-probability of the trainer is {difference:.2g} from the "
            "rollout's, and not one bit may differ"
        )
        # a comparison runs in one process
        if self.explain is not None and jax.process_count() == 1:
            found = f"{found}: {self.explain(self.session, rollout)}"
        if not self.session.exact_by_default:
            raise UserError(f"precision.exact: {found}. With precision.exact = false it goes on")
        self.inexact = True
        _log.warning("precision.exact = auto: %s. The run goes on, and is marked", found)
        if is_main_process():
            note(self.setup.directory, {"inexact": {"step": step, "difference": difference}})

    def _scored(self, scores: Scores) -> dict[str, float]:
        """reward/* and rewards/* of everything that was sampled; an update knows only what it
        learned from."""
        samples = self.config.rollout.samples_per_prompt
        metrics = rl.reward_metrics(
            jnp.asarray(scores.rewards), samples, jnp.asarray(~scores.failed)
        )
        metrics["reward/accuracy"] = scores.correct.mean()
        return {name: float(value) for name, value in metrics.items()} | scores.metrics()

    def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics where they are due before `step`, else nothing."""
        config, session = self.config.evaluation, self.session
        if not config.every or (step % config.every and step < self.steps):
            return {}
        assert isinstance(self.setup.held_out, Dataset) and self.pool is not None
        examples = self.setup.held_out.examples[: config.examples]
        key = sample_key(self.config.seed, 0)
        with session.clock.enter("eval"):
            found = evaluate(session, self.pool, examples, config, key)
        if self.evaluations is not None:
            self.evaluations.write([{"step": step, **found.row}])
        return found.metrics


def _alone() -> bool:
    """Whether a step may be given up without a word to other processes."""
    return jax.process_count() == 1


def _asked(stop: Stopping) -> bool:
    """Whether a signal has asked any process to stop; all call it together."""
    return bool(stop.asked if _alone() else sum_over_processes(np.int32(bool(stop.asked))))

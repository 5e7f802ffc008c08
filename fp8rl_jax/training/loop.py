"""Held-out evaluation: avg@k and pass@k with intervals.

A run around a session: problems and their rewards in, metrics, samples, checkpoints and the
trained model out.

A step samples, scores in worker processes, and updates; session.py says what happens inside.
Held-out problems are evaluated and checkpoints written on the way. A checkpoint holds weights,
optimizer, KV scales, and the loss scale and clip bounds where they are found on the way, and
everything random is a function of (seed, step), so a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from fp8rl_jax import rl
from fp8rl_jax.config.training import EvaluationConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import check_same, is_main_process, leave_on_failure, shared_faults, to_host
from fp8rl_jax.rollout.engine import Rollout
from fp8rl_jax.statistics import wilson_interval
from fp8rl_jax.tasks.dataset import Dataset, Example
from fp8rl_jax.tasks.distributed import score_distributed
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.collect import Collector
from fp8rl_jax.training.experience import play
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.session import Session, at_temperature, sample_key
from fp8rl_jax.training.setup import (
    Setup,
    announce,
    mark_inexact,
    reward_log,
    reward_pool,
    write_run_record,
)
from fp8rl_jax.training.tracking import JsonLines, Trackers, Watch, make_tracker

_log = logging.getLogger("fp8rl")

Explain = Callable[[Session, Rollout], str]
"""Says where trainer and rollout part on a rollout's tokens, under the session's present
weights."""


@dataclass(frozen=True)
class Evaluation:
    """Answers to held-out problems, scored."""

    metrics: dict[str, float]
    """`eval/accuracy` (avg@k: mean of correct samples; pass@1), `eval/accuracy_low`,
    `eval/accuracy_high` (95 % Wilson interval over problems, samples of a problem averaged),
    `eval/problems` (their number), `eval/pass_at_k` where k > 1, `eval/mean_length`,
    `eval/failed_rewards` (answers whose reward failed, which count as wrong)."""
    correct: Int[np.ndarray, " problems"]
    """Right answers to each problem, of `samples`."""
    samples: int
    problems: str
    """SHA-256 of the problems, first 16 digits: what `correct` counts."""
    answers: list[dict]
    """One row an answer: prompt, completion, answer, reward."""

    @property
    def row(self) -> dict:
        """As evaluations.jsonl has it."""
        return {
            "problems": self.problems,
            "samples": self.samples,
            "correct": self.correct.tolist(),
        }


def evaluate(
    session: Session,
    pool: RewardPool,
    examples: Sequence[Example],
    config: EvaluationConfig,
    key: Key[Array, ""],
) -> Evaluation:
    """Answer every example `config.samples` times, or play episodes, and score the answers.

    The first failure of a reward is logged.

    Args:
        session: answers with the weights that it serves, which do not change.
        pool: scores, or plays the environments.
        examples: problems.
        config: how many samples, at which temperature; nothing else of the session's sampling is
            truncated or biased.
        key: fixes the draws.
    """
    prompts_a_batch, sampling = (
        max(config.batch_size // config.samples, 1),
        at_temperature(session.sampling, config.temperature),
    )
    found, lengths, rows = [], [], []
    for start in range(0, len(examples), prompts_a_batch):
        part = list(examples[start : start + prompts_a_batch])
        answer = _play if pool.task.max_turns > 1 else _complete
        with jax.set_mesh(session.mesh):
            scores, texts, tokens = answer(
                session, pool, part, prompts_a_batch, config.samples, sampling, key
            )
        found.append(scores)
        lengths.append(tokens)
        for row, text in enumerate(texts):
            example = part[row // config.samples]
            rows.append(
                {
                    "prompt": example.prompt,
                    "completion": text,
                    "answer": example.answer,
                    "reward": float(scores.rewards[row]),
                }
            )
    scores = Scores.join(found)
    if (line := scores.failure_text()) and is_main_process():
        _log.warning("evaluation: %s", line)
    table = scores.correct.reshape(len(examples), config.samples).astype(np.float64)
    accuracy = float(table.mean())
    low, high = wilson_interval(accuracy, len(table))
    metrics = {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/problems": float(len(table)),
        "eval/mean_length": float(np.concatenate(lengths).mean()),
        "eval/failed_rewards": float(scores.failed.sum()),
    }
    if config.samples > 1:
        metrics["eval/pass_at_k"] = float(table.max(1).mean())
    problems = Dataset(tuple(examples)).fingerprint[:16]
    return Evaluation(metrics, table.sum(1).astype(int), config.samples, problems, rows)


def _complete(
    session, pool, part, prompts, samples, sampling, key
) -> tuple[Scores, list[str], np.ndarray]:
    """Scores, texts and token counts of the answers to `part`, which is one batch of `prompts` or
    the rest of one."""
    # filled up with its first example, so that one compiled program serves all
    filled = part + part[:1] * (prompts - len(part))
    rollout = session.engine.generate(session.encoder.batch(filled), samples, sampling, key)
    texts = session.encoder.texts(rollout)[: len(part) * samples]
    return score_distributed(pool, part, texts), texts, to_host(rollout.mask).sum(1)[: len(texts)]


def _play(
    session, pool, part, prompts, samples, sampling, key
) -> tuple[Scores, list[str], np.ndarray]:
    """The same of episodes: an episode's tokens are those of all its completions."""
    slots = prompts * samples
    episodes, scores = play(
        session.engine, session.encoder, pool, part, samples, sampling, key, Clock(), slots=slots
    )
    tokens = np.array([sum(len(turn.tokens) for turn in episode.turns) for episode in episodes])
    return scores, [episode.transcript for episode in episodes], tokens


def evaluate_held_out(setup: Setup, pool: RewardPool) -> Evaluation:
    """Evaluate a run's policy on its held-out set.

    An FP8 cache is calibrated on the prompts.

    Raises:
        UserError: weights or scales that are not finite after quantization.
    """
    config, session = setup.config.evaluation, setup.session
    examples = setup.held_out.examples[: config.examples]
    session.sync(session.encoder.batch(examples[: config.batch_size]))
    return evaluate(session, pool, examples, config, jax.random.key(setup.config.seed))


def train(setup: Setup, explain: Explain | None = None) -> None:
    """Run `trainer.steps` steps.

    Leaves metrics, samples, evaluations, checkpoints and the trained model in the run directory.

    Args:
        explain: called where a bit differs in a run in exact mode.

    Raises:
        UserError: the run directory is taken, a checkpoint cannot be written or read, too many
            updates were skipped, or every reward failed in too many steps.
    """
    config = setup.config
    check_same(
        repr(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, process_id=-1)))
    )
    with leave_on_failure(), jax.set_mesh(setup.session.mesh), ExitStack() as stack:
        with shared_faults():
            if (
                is_main_process()
                and not config.resume
                and (setup.directory / "metrics.jsonl").exists()
            ):
                raise UserError(
                    f"{setup.directory} holds a run already; give --resume, or another --output"
                )
            pool = stack.enter_context(reward_pool(setup))
        if is_main_process():
            announce(setup, print, "rollout.prompts_per_step")
        with shared_faults():
            loop = Loop(setup, pool, explain)
        loop.run()


class Loop:
    """A run in progress."""

    def __init__(self, setup: Setup, pool: RewardPool, explain: Explain | None = None):
        self.explain = explain
        self.setup, self.config, self.session, self.pool = setup, setup.config, setup.session, pool
        config = setup.config
        self.collector = Collector(self.session, setup.train, pool, config)
        self.checkpoints = Checkpoints(setup.directory / "checkpoints", config.checkpoint)
        self.watch = Watch(
            config.trainer, self.checkpoints.directory, config.compute_dtype, reward_log(setup)
        )
        if config.resume:
            self.session.load_saved(*self.checkpoints.restore(self.session.saved()))
            _log.info("resuming at step %d from %s", self.session.step, self.checkpoints.directory)
        self.start, self.inexact = self.session.step, False
        if is_main_process():
            write_run_record(setup)
            self.tracker = make_tracker(
                setup.directory,
                config.tracking,
                total_steps=config.trainer.steps,
                start_step=self.start,
                settings=dataclasses.asdict(config),
            )
            self.samples = JsonLines(setup.directory / "samples.jsonl", self.start)
            self.evaluations = JsonLines(setup.directory / "evaluations.jsonl", self.start)
        else:
            self.tracker, self.samples, self.evaluations = Trackers([]), None, None

    def run(self) -> None:
        steps, every, session = (
            self.config.trainer.steps,
            self.config.checkpoint.every,
            self.session,
        )
        try:
            session.sync(self.collector.prompts(self.start))
            for step in range(self.start, steps):
                # every row is written before the checkpoint that makes a resumed run go on behind
                # it
                metrics = self._evaluate(step) | self._step(step)
                # time/* and perf/* since the last row: the step itself, its evaluation, and the
                # checkpoint before it
                self.tracker.log(step, metrics | session.lap())
                if step + 1 == steps or (every and (step + 1) % every == 0):
                    with session.clock.part("ckpt"):
                        self.checkpoints.save(step + 1, session.saved())
            # a run that was killed behind its last checkpoint has no row of it either
            if self.config.evaluation.every:
                self.tracker.log(steps, self._evaluate(steps))
            session.save(self.setup.directory / "model", adapters=self.setup.directory / "adapter")
        finally:
            self.tracker.close()
            for file in (self.samples, self.evaluations):
                if file is not None:
                    file.close()
            self.checkpoints.close()

    def _step(self, step: int) -> dict[str, float]:
        found = self.collector.collect(step)
        rewards = [
            float(x) if ok else None for x, ok in zip(found.rewards, found.valid, strict=True)
        ]
        metrics = self.session.update(
            found.experience, rewards, found.entering, self.collector.prompts(step + 1)
        )
        if self.session.recipe.exact and not self.inexact:
            largest = metrics["mismatch/logprob_abs_diff_max"]
            self._check_exact(step, largest, found.experience.rollout)
        metrics |= self._scored(found.scores)
        metrics |= {
            "rollout/rounds": float(found.rounds),
            "rollout/teaching_prompts": float(found.informative.sum()),
        }
        metrics["rollout/dropped"] = float(self.setup.dropped)
        metrics |= self.watch.see(step, metrics, found.scores)
        if self.samples is not None:
            self.samples.write(
                {"step": step, **row} for row in found.shown(self.config.tracking.samples)
            )
        return metrics

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
            mark_inexact(self.setup.directory, step, difference)

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
        if not config.every or (step % config.every and step < self.config.trainer.steps):
            return {}
        examples = self.setup.held_out.examples[: config.examples]
        key = sample_key(self.config.seed, 0)
        with session.clock.part("eval"):
            found = evaluate(session, self.pool, examples, config, key)
        if self.evaluations is not None:
            self.evaluations.write([{"step": step, **found.row}])
        return found.metrics

"""Supervised training: on a task's answers, the warm start before reinforcement learning, or on
text.

The loop is that of reinforcement learning (training/loop.py), with its checkpoints, its resuming
and its records; what a step does is another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from fp8rl_jax.config.fingerprint import FREE_SUPERVISED
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import check_batch, is_main_process, leave_on_failure, shared_faults
from fp8rl_jax.tasks.dataset import Dataset, Example
from fp8rl_jax.training.console import SFT_COLUMNS, TEXT_COLUMNS
from fp8rl_jax.training.evaluation import evaluate_held_out
from fp8rl_jax.training.loop import Loop, check_config, refuse_taken
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.record import owned
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import Setup, announce, reward_pool
from fp8rl_jax.training.text import Text
from fp8rl_jax.training.tracking import JsonLines

_log = logging.getLogger("fp8rl")
_LOGGED = 10
"""Steps between rows of metrics.jsonl."""


def supervise(setup: Setup, report=print) -> None:
    """Minimize the mean negative log-likelihood of the answers' tokens, prompts not counted; of a
    run on text, of all tokens.

    Args:
        setup: the parts of the run; its training set must have answers.
        report: receives lines about what happens.

    Raises:
        UserError: a problem has no answer, or an answer is longer than rollout.max_new_tokens; the
            run directory is taken, a checkpoint cannot be written or read, or too many updates
            were skipped; processes have other configurations; sft.batch_size does not divide by the
            mesh.
    """
    sft, on_text = setup.config.sft, isinstance(setup.train, Text)
    check_config(setup.config)
    if not on_text:
        check_batch(sft.batch_size, setup.session.mesh, "sft.batch_size")
    if is_main_process():
        announce(setup, report, "sft.batch_size")
        cut = f", {sft.cut_short:.0%} of them cut one token short" if sft.cut_short else ""
        report(
            f"Pretraining: {sft.steps} updates of {sft.batch_size} rows of {sft.row_tokens} tokens"
            if on_text
            else f"Supervised warm start: {sft.steps} updates on the task's own answers{cut}"
        )
    with leave_on_failure(), jax.set_mesh(setup.session.mesh), ExitStack() as stack:
        with shared_faults():
            if is_main_process():
                stack.enter_context(owned(setup.directory))
                refuse_taken(setup)
            pool = None if on_text else stack.enter_context(reward_pool(setup))
            loop = (TextLoop if on_text else SupervisedLoop)(setup, pool)
        if loop.is_finished():
            return
        with shared_faults():
            loop.open_records()
        loop.run()
    if is_main_process():
        report(f"{loop.told}; model in {setup.directory / 'model'}")


class SupervisedLoop(Loop):
    """A run on the answers of a task's problems."""

    columns, free, supervised = SFT_COLUMNS, FREE_SUPERVISED, True
    told = "Warm start: nothing held out"

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.sft.steps

    def prepare(self) -> None:
        """Begin with the stage's own optimizer."""
        self.session.restart(self.config.sft.optimizer, self.steps)

    def open_samples(self) -> None:
        """Open the file of what is right on each held-out problem."""
        self.evaluations = JsonLines(self.setup.directory / "evaluations.jsonl", self.start)

    def begin(self) -> None:
        """Nothing is served."""

    def collect(self, step: int) -> Any:
        """Encode the problems and answers of a step."""
        assert isinstance(self.setup.train, Dataset)
        config, encoder = self.config, self.session.encoder
        examples = self.setup.train.batch(step, config.sft.batch_size, config.seed)
        return encoder.batch(examples), demonstrations(encoder, examples, step, config)

    def learn(self, found: Any) -> dict[str, float]:
        """Make one update."""
        return self.session.supervise(*found)

    def _step(self, step: int, found: Any, before: dict[str, float]) -> dict[str, float]:
        with self.session.clock.enter("train"):
            metrics = self.learn(found)
        metrics["optim/lr"] = float(self.session.learner.schedule(step))
        metrics |= self.watch.see(step, metrics)
        if not self.watch.skipping:
            self.checkpoints.mark_good()
        return metrics

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record every tenth step, those with an evaluation, and the last."""
        measured = any(name.startswith("eval/") for name in metrics)
        if step % _LOGGED == 0 or step + 1 == self.steps or measured:
            self.tracker.log(step, metrics)

    @property
    def evaluates(self) -> bool:
        """Whether anything is held out."""
        return len(self.setup.held_out) > 0

    def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy behind the last step, and loss of the answers."""
        if step < self.steps:
            return {}
        assert self.pool is not None
        found = evaluate_held_out(self.setup, self.pool)
        if self.evaluations is not None:
            self.evaluations.write([{"step": step, **found.row}])
        metrics = found.metrics | answers_loss(self.setup)
        self.told = f"Warm start: held-out accuracy {metrics['eval/accuracy']:.2f}"
        return metrics

    def save_model(self) -> None:
        """Write what was trained, all of its float32."""
        directory = self.setup.directory
        self.session.save(directory / "model", "float32", adapters=directory / "adapter")


def answers_loss(setup: Setup) -> dict[str, float]:
    """Measure a policy on the answers of the first evaluation.examples held-out problems.

    Returns:
        eval/loss, in nats a token of an answer, in the trainer's formats, and eval/perplexity;
        nothing where problems have no answers.
    """
    assert isinstance(setup.held_out, Dataset)
    config = setup.config.evaluation
    examples = [x for x in setup.held_out.examples[: config.examples] if x.target]
    if not examples:
        return {}
    loss = mean_loss(setup.session, examples, config.batch_size)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss)}


def mean_loss(session: Session, examples: Sequence[Example], batch_size: int) -> float:
    """Compute the mean negative log-likelihood of answers, in nats a token.

    In the trainer's formats, at temperature 1.

    Args:
        session: its weights are measured.
        examples: at least one, each with an answer.
        batch_size: problems computed at one time.
    """
    targets = [session.encoder.target(example) for example in examples]
    found = session.logprobs(examples, targets, batch_size, temperature=1.0)
    return -float(np.concatenate(found).mean(dtype=np.float64))


class TextLoop(SupervisedLoop):
    """A run on text."""

    columns = TEXT_COLUMNS
    told = "Pretraining: nothing held out"

    def open_samples(self) -> None:
        """There are no problems."""

    def collect(self, step: int) -> Any:
        """Give the rows of a step."""
        assert isinstance(self.setup.train, Text)
        return self.setup.train.batch(step, self.config.sft.batch_size, self.config.seed)

    def learn(self, found: Any) -> dict[str, float]:
        """Make one update."""
        metrics = self.session.pretrain(found)
        return metrics | {"perplexity": perplexity(metrics["loss"])}

    @property
    def evaluates(self) -> bool:
        """Whether anything is held out and is to be measured."""
        return len(self.setup.held_out) > 0 and self.config.evaluation.every > 0

    def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out loss where it is due before `step`, else nothing."""
        every = self.config.evaluation.every
        if not self.evaluates or (step % every and step < self.steps):
            return {}
        with self.session.clock.enter("eval"):
            metrics = evaluate_text(self.setup)
        self.told = f"Pretraining: held-out loss {metrics['eval/loss']:.4f} nats a token"
        return metrics


def evaluate_text(setup: Setup) -> dict[str, float]:
    """Measure a policy on the first evaluation.examples rows of a run's held-out text.

    Returns:
        eval/loss, in nats a token; eval/perplexity; and eval/tokens, how many were predicted.
    """
    text, config = setup.held_out, setup.config.evaluation
    assert isinstance(text, Text)
    loss, tokens = setup.session.text_loss(text, config.examples, config.batch_size)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/tokens": float(tokens)}


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token."""
    return math.exp(loss) if loss < 700 else math.inf


def demonstrations(
    encoder: PromptEncoder, examples: Sequence[Example], step: int, config: RunConfig
) -> list[list[int]]:
    """Encode the answers, their end of sequence included.

    Some of them lose their last token before it (sft.cut_short).

    Raises:
        UserError: a problem has no answer, or an answer has more than rollout.max_new_tokens
            tokens.
    """
    cut = np.random.default_rng((config.seed, step)).random(len(examples)) < config.sft.cut_short
    width, answers = config.rollout.max_new_tokens, []
    for row, example in enumerate(examples):
        if not example.target:
            raise UserError(f"task.answer_template: {example.where} has no answer to learn from")
        target = encoder.target(example)
        if cut[row] and len(target) > 2:
            target = [*target[:-2], target[-1]]
        if len(target) > width:
            raise UserError(
                f"rollout.max_new_tokens = {width}: the answer of {example.where} has "
                f"{len(target)} tokens; raise it"
            )
        answers.append(target)
    return answers

"""Supervised training on a task's answers: the warm start before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_main_process, leave_on_failure
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.training.console import SFT_COLUMNS
from fp8rl_jax.training.evaluation import evaluate_held_out
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.record import owned, write_run_record
from fp8rl_jax.training.setup import Setup, announce, reward_pool
from fp8rl_jax.training.tracking import make_tracker


def supervise(setup: Setup, report=print) -> None:
    """Minimize the mean negative log-likelihood of the answers' tokens, prompts not counted.

    Args:
        setup: the parts of the run; its training set must have answers.
        report: receives lines about what happens.

    Raises:
        UserError: a problem has no answer, or an answer is longer than rollout.max_new_tokens.
    """
    config, sft, session = setup.config, setup.config.sft, setup.session
    directory = setup.directory
    announce(setup, report, "sft.batch_size")
    cut = f", {sft.cut_short:.0%} of them cut one token short" if sft.cut_short else ""
    report(f"Supervised warm start: {sft.steps} updates on the task's own answers{cut}")
    with leave_on_failure(), owned(directory), reward_pool(setup) as pool:
        write_run_record(config)
        session.restart(sft.optimizer, sft.steps)
        tracker = make_tracker(
            directory, config.tracking, total_steps=sft.steps, columns=SFT_COLUMNS
        )
        try:
            for step in range(sft.steps):
                examples = setup.train.batch(step, sft.batch_size, config.seed)
                answers = demonstrations(session.encoder, examples, step, config)
                metrics = session.supervise(session.encoder.batch(examples), answers)
                if step % 10 == 0 or step + 1 == sft.steps:
                    tracker.log(step, metrics)
            accuracy = evaluate_held_out(setup, pool).metrics if len(setup.held_out) else {}
            if accuracy:
                tracker.log(sft.steps, accuracy)
        finally:
            tracker.close()
        session.save(directory / "model", "float32", adapters=directory / "adapter")
    measured = (
        f"held-out accuracy {accuracy['eval/accuracy']:.2f}" if accuracy else "nothing held out"
    )
    if is_main_process():
        report(f"Warm start: {measured}; model in {directory / 'model'}")


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

"""Supervised training on a task's answers: the warm start before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.lora import join, split
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import batch_sharding, is_main_process, to_global
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.workers import RewardPool
from fp8rl_jax.training.console import SFT_COLUMNS
from fp8rl_jax.training.evaluate import evaluate_held_out
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.setup import Setup, announce, reward_log, save_model, write_run_record
from fp8rl_jax.training.state import TrainState, apply_gradients, make_optimizer, scaled_loss, sharded_state
from fp8rl_jax.training.step import Batch, StepConfig, completion_logprobs
from fp8rl_jax.training.tracking import make_tracker


def supervise(setup: Setup, config_text: str, report=print) -> None:
    """Minimizes the mean negative log-likelihood of the answers' tokens, prompts not counted; writes the model.

    Args:
        setup: the parts of the run; its training set must have answers.
        config_text: resolved configuration, for the run directory.
        report: receives lines about what happens.

    Raises:
        UserError: a problem has no answer, or an answer is longer than rollout.max_new_tokens.
    """
    config, sft = setup.config, setup.config.sft
    directory = setup.directory
    write_run_record(directory, config_text)
    announce(setup, report, "sft.batch_size")
    cut = f", {sft.cut_short:.0%} of them cut one token short" if sft.cut_short else ""
    report(f"Supervised warm start: {sft.steps} updates on the task's own answers{cut}")
    optimizer = make_optimizer(sft.optimizer, sft.steps)
    step_config = StepConfig(
        setup.recipe, RLConfig(), config.compute_dtype, temperature=1.0, remat=config.trainer.remat == "layer",
        logprob_chunk=config.trainer.logprob_chunk, attention_chunk=config.trainer.attention_chunk,
        backend=config.precision.backend, loss_scale=config.trainer.loss_scale.resolve(config.compute_dtype),
    )  # fmt: skip
    with jax.set_mesh(setup.mesh), RewardPool(config.task, reward_log(setup)) as pool:
        state = sharded_state(setup.policy, optimizer, setup.mesh, step_config.loss_scale)
        tracker = make_tracker(directory, config.tracking, total_steps=sft.steps, columns=SFT_COLUMNS)
        try:
            for step in range(sft.steps):
                examples = setup.train.batch(step, sft.batch_size, config.seed)
                batch = _batch(setup.encoder, examples, setup.sampling.max_new_tokens, step, config)
                batch = to_global(batch, batch_sharding(setup.mesh))
                trained, frozen = split(state.policy)
                state, metrics = _update(replace(state, policy=trained), frozen, batch, step_config, optimizer)
                state = replace(state, policy=join(state.policy, frozen))
                if step % 10 == 0 or step + 1 == sft.steps:
                    tracker.log(step, {name: float(value) for name, value in metrics.items()})
            setup.policy = state.policy
            accuracy = evaluate_held_out(setup, pool) if len(setup.held_out) else {}
            if accuracy:
                tracker.log(sft.steps, accuracy)
        finally:
            tracker.close()
        if is_main_process():
            save_model(state.policy, setup, "float32")
    measured = f"held-out accuracy {accuracy['eval/accuracy']:.2f}" if accuracy else "nothing held out"
    report(f"Warm start: {measured}; model in {directory / 'model'}")


@partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames="state")
def _update(state: TrainState, frozen: Policy | None, batch: Batch, config: StepConfig, optimizer: optax.GradientTransformation):
    def loss_fn(trained):
        logprobs, _ = completion_logprobs(join(trained, frozen), batch, config)
        loss = -jnp.sum(jnp.where(batch.mask, logprobs, 0.0)) / batch.mask.sum()
        return scaled_loss(loss, state, config.loss_scale), loss

    (_, loss), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.policy)
    state, metrics = apply_gradients(state, gradients, loss, optimizer, config.loss_scale)
    return state, {"loss": loss, **metrics}


def _batch(encoder: PromptEncoder, examples: Sequence[Example], width: int, step: int, config) -> Batch:
    prompts = encoder.batch(examples)
    tokens, mask = np.zeros((len(examples), width), np.int32), np.zeros((len(examples), width), bool)
    cut = np.random.default_rng((config.seed, step)).random(len(examples)) < config.sft.cut_short
    for row, example in enumerate(examples):
        if not example.target:
            raise UserError(f"task.answer_template: problem {example.index} has no answer to learn from")
        target = encoder.target(example)
        if cut[row] and len(target) > 2:
            target = [*target[:-2], target[-1]]
        if len(target) > width:
            raise UserError(
                f"rollout.max_new_tokens = {width}: the answer of problem {example.index} has {len(target)} tokens; raise it"
            )
        tokens[row, : len(target)], mask[row, : len(target)] = target, True
    zeros = np.zeros(tokens.shape, np.float32)
    return Batch(prompts.tokens, prompts.lengths, tokens, mask, zeros, zeros[:, 0])

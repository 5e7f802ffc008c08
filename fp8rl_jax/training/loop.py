"""The RL loop: sample, score, update, calibrate, sync; evaluate and save on the way.

One step does, in this order:

    rollout     n completions of each of P prompts, or n episodes, with the weights of the last sync
    reward      in worker processes; of episodes after each turn
    score       log-probabilities of the reference and of the old policy, where the loss, the reward or a correction needs them
    update      one or several optimizer updates; where there is one, its own forward gives the old log-probabilities
    calibrate   KV scales from the new weights on this step's tokens, where the recipe has an FP8 cache
    sync        the new weights, quantized, to the engine; where the rollout calibrates its cache, it does so now, on the next
                step's training prompts, so that what an evaluation asks in between changes nothing

Everything random is a function of (seed, step), and a checkpoint holds weights, optimizer, KV scales, and the loss scale
and clip bounds where they are found on the way, so a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import rl
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.rl import RLConfig, check_sampling
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.parallel import (
    check_same,
    is_main_process,
    leave_on_failure,
    replicated,
    shard_policy,
    shared_faults,
    to_global,
    to_host,
)
from fp8rl_jax.rollout.calibration import calibrate_on_prompts, observe_qkv, qkv_metrics, scales_from_amax
from fp8rl_jax.tasks.workers import RewardPool
from fp8rl_jax.training.adapters import restored, to_save
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.collect import Collector
from fp8rl_jax.training.evaluate import evaluate, evaluation_sampling
from fp8rl_jax.training.learner import Learner
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.setup import Setup, announce, reward_log, reward_pool, save_model, write_run_record
from fp8rl_jax.training.state import TrainState, sharded_state
from fp8rl_jax.training.step import Batch
from fp8rl_jax.training.tracking import JsonLines, Trackers, make_tracker
from fp8rl_jax.training.watch import Watch

_log = logging.getLogger("fp8rl")
# programs, and not dozens of small operations, which on a mesh may wait for each other without an end
_mismatch = jax.jit(rl.mismatch_metrics, static_argnames="config")
_reward_kl = jax.jit(rl.reward_kl, static_argnames="config")
_lengths = jax.jit(partial(jnp.sum, axis=1))


@partial(jax.jit, static_argnames=("config", "samples", "longest"))
def _advantages(rewards, valid, lengths, divergence, *, config: RLConfig, samples: int, longest: int):
    """Advantages of the samples from what the task gave them, and what was taken from that."""
    overlong = rl.overlong_penalty(lengths, longest, config.overlong.buffer, config.overlong.penalty)
    metrics = {"reward/overlong_penalty": overlong.mean()}
    if divergence is not None:
        rewards, metrics["reward/kl"] = rewards - config.reward_kl.coefficient * divergence, divergence.mean()
    return rl.group_advantages(rewards + overlong, samples, config.advantage, valid, lengths), metrics


def train(setup: Setup, config_text: str) -> None:
    """Runs `trainer.steps` steps and leaves metrics, samples, checkpoints and the trained model in the run directory.

    Args:
        setup: the parts of the run.
        config_text: the resolved configuration, for config.toml and for the check that all processes have the same.

    Raises:
        UserError: the run directory is taken, a checkpoint cannot be written or read, too many updates were skipped, or every
            reward failed in too many steps.
    """
    config = setup.config
    check_same(repr(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, process_id=-1))))
    with leave_on_failure(), jax.set_mesh(setup.mesh), ExitStack() as stack:
        with shared_faults():
            if is_main_process() and not config.resume and (setup.directory / "metrics.jsonl").exists():
                raise UserError(f"{setup.directory} holds a run already; give --resume, or another --output")
            pool = stack.enter_context(reward_pool(setup))
        if is_main_process():
            announce(setup, print, "rollout.prompts_per_step")
        with shared_faults():
            loop = Loop(setup, config_text, pool)
        loop.run()


class Loop:
    """A run in progress."""

    def __init__(self, setup: Setup, config_text: str, pool: RewardPool):
        self.setup, self.config, self.pool = setup, setup.config, pool
        config, sampling = setup.config, setup.sampling
        self.truncated = check_sampling(
            config.rl.correction,
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
            bad_words=config.rollout.bad_words, logit_bias=config.rollout.logit_bias,
        )  # fmt: skip
        self.learner = Learner(setup)
        clipping, bounds = config.rl.clip_calibration, None
        if clipping.enabled:
            bounds = clipping.start(config.rl.clip_low, config.rl.clip_high)
        self.state: TrainState = sharded_state(
            setup.policy, self.learner.optimizer, setup.mesh, self.learner.config.loss_scale, bounds
        )
        setup.policy = self.state.policy
        self.engine = setup.engine()
        self.collector = Collector(setup, pool)
        self.checkpoints = Checkpoints(setup.directory / "checkpoints", config.checkpoint)
        self.watch = Watch(config.trainer, self.checkpoints.directory, config.compute_dtype, reward_log(setup))
        self.clock = Clock()
        self.start = 0
        self.scales: KVScales | None = None
        if config.resume:
            self._resume()
        if is_main_process():
            write_run_record(setup.directory, config_text)
            self.tracker = make_tracker(
                setup.directory, config.tracking, total_steps=config.trainer.steps, start_step=self.start,
                settings=dataclasses.asdict(config),
            )  # fmt: skip
            self.samples = JsonLines(setup.directory / "samples.jsonl", self.start)
        else:
            self.tracker, self.samples = Trackers([]), None

    def calibrates(self, side: str) -> bool:
        """Whether there is an FP8 cache, and this side measures its scales."""
        recipe: Recipe = self.setup.recipe
        return recipe.quantizes_cache and recipe.kv_calibration == side

    def _sync(self, step: int) -> None:
        """Serves the present weights for `step`."""
        with self.clock.part("sync"):
            self.engine.sync(self.state.policy, self.scales)
            jax.block_until_ready(self.engine.policy)
        if self.calibrates("rollout"):
            with self.clock.part("calibrate"):
                self.engine.calibrate(self.collector.prompts(step))
                jax.block_until_ready(self.engine.scales)

    def run(self) -> None:
        steps, every = self.config.trainer.steps, self.config.checkpoint.every
        try:
            if self.calibrates("trainer") and self.scales is None:
                prompts, engine = self.collector.prompts(self.start), self.engine
                self.scales = calibrate_on_prompts(
                    self.state.policy, prompts, self.setup.recipe, engine.dtype, engine.backend
                )
            self._sync(self.start)
            for step in range(self.start, steps):
                # every row is written before the checkpoint that makes a resumed run go on behind it
                with self.clock.part("step"):
                    metrics = self._evaluate(step) | self._step(step)
                # time/* and perf/* since the last row: the step itself, its evaluation, and the checkpoint before it
                self.tracker.log(step, metrics | self.clock.metrics())
                self.clock = Clock()
                if step + 1 == steps or (every and (step + 1) % every == 0):
                    with self.clock.part("step"), self.clock.part("ckpt"):
                        self.checkpoints.save(step + 1, self._saved())
            if self.start < steps and self.config.evaluation.every:
                self.tracker.log(steps, self._evaluate(steps))
            policy = to_host(self.state.policy)
            with shared_faults():
                if is_main_process():
                    save_model(policy, self.setup)
        finally:
            self.tracker.close()
            if self.samples is not None:
                self.samples.close()
            self.checkpoints.close()

    def _step(self, step: int) -> dict[str, float]:
        config, clock = self.config, self.clock
        found = self.collector.collect(self.engine, step, clock)
        samples = config.rollout.samples_per_prompt
        batch = self.learner.scored(self.state, found.batch(self.learner.config.rl, self.truncated), clock)
        lengths, divergence = found.by_sample(_lengths(batch.mask)), None
        if config.rl.reward_kl.coefficient:
            divergence = _reward_kl(batch.old_logprobs, batch.reference_logprobs, batch.mask, config=config.rl.reward_kl)
            divergence = found.by_sample(divergence)
        advantages, reward_metrics = _advantages(
            found.rewards, found.valid, lengths, divergence,
            config=config.rl, samples=samples, longest=config.rollout.max_new_tokens,
        )  # fmt: skip
        batch = dataclasses.replace(batch, advantages=found.by_row(advantages))
        self.state, train_logprobs, metrics = self.learner.update(self.state, batch, clock)
        # XLA may lay small tensors out anew, and every program would be compiled for both layouts
        self.state = shard_policy(self.state, self.setup.mesh)
        mismatch = _mismatch(
            found.policy_logprobs, train_logprobs, batch.mask, batch.advantages, config=self.learner.config.rl.correction
        )
        metrics |= reward_metrics | jax.block_until_ready(mismatch)
        if self.calibrates("trainer"):
            with clock.part("calibrate"):
                self.scales, kv_metrics = jax.block_until_ready(self._calibrate(batch))
            metrics |= kv_metrics
        self._sync(step + 1)
        clock.work(self.state.policy.config, *found.work(), frozen=config.lora.rank > 0)
        metrics |= found.metrics() | self.engine.metrics
        scales, finite = to_host((self.engine.scales, self.engine.finite))
        if scales is not None:
            metrics |= {f"fp8/kv_scale_{role[0]}": getattr(scales, role).max() for role in ("query", "key", "value")}
        metrics |= {f"fp8/nonfinite_{role}": 1.0 - ok for role, ok in finite.items()}
        scores = found.scores
        metrics |= rl.reward_metrics(jnp.asarray(scores.rewards), samples, jnp.asarray(~scores.failed))
        metrics["reward/accuracy"] = scores.correct.mean()
        metrics |= {"rollout/rounds": found.rounds, "rollout/teaching_prompts": found.teaches.sum()}
        metrics["rollout/dropped"] = self.setup.dropped
        metrics = {name: float(value) for name, value in to_host(metrics).items()} | scores.metrics()
        metrics |= self.watch.see(step, metrics, scores)
        if self.samples is not None:
            self.samples.write({"step": step, **row} for row in found.shown(config.tracking.samples))
        return metrics

    def _calibrate(self, batch: Batch) -> tuple[KVScales, dict]:
        """Scales for the new weights, and what the scales served until now do to them."""
        recipe = self.setup.recipe
        sums = observe_qkv(
            self.state.policy, batch.prompts, batch.lengths, batch.tokens, batch.present, self.scales,
            recipe=recipe, dtype=self.engine.dtype, micro_batches=self.learner.micro_batches, backend=self.engine.backend,
        )  # fmt: skip
        jax.block_until_ready(sums)
        return scales_from_amax(sums.amax, recipe), qkv_metrics(sums)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics where they are due before `step`, else nothing."""
        config = self.config.evaluation
        if not config.every or (step % config.every and step < self.config.trainer.steps):
            return {}
        examples = self.setup.held_out.examples[: config.examples]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), 1), 0)
        sampling = evaluation_sampling(config, self.setup.sampling)
        with self.clock.part("eval"):
            metrics, _ = evaluate(self.engine, self.setup.encoder, self.pool, examples, config, sampling, key)
        return metrics

    def _saved(self):
        layers = self.setup.policy.config.num_layers
        scales = self.scales or KVScales(*(jnp.zeros(layers) for _ in range(3)))
        return *to_save(self.state), to_global(jax.tree.map(np.asarray, scales), replicated(self.setup.mesh))

    def _resume(self) -> None:
        self.start, (*saved, scales) = self.checkpoints.restore(self._saved())
        self.state = restored(self.state, *saved)
        self.setup.policy = self.state.policy
        if self.calibrates("trainer"):
            self.scales = scales
        self.engine.version = self.start
        _log.info("resuming at step %d from %s", self.start, self.checkpoints.directory)

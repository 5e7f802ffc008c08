"""What is learned from one rollout: reference and old log-probabilities where they are needed, then
one or several updates.

A single update takes its own forward as the old policy, so the old-logprob pass is skipped; several
updates, corrections of the whole batch, and a KL divergence in the reward need it made before.

Calibrated clipping (rl.calibrated_bounds): a calibrating step runs its rollout once more with
nothing quantized, before the first update, and each later mini-batch before its own update: two
forwards, as in the paper. The FP8 side of the comparison costs nothing, since updates return the
log-probabilities that they computed. The first mini-batch is left out: it meets the old policy, and
all its ratios are 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax import rl
from fp8rl_jax.config.formats import COMPUTE
from fp8rl_jax.config.recipe import Recipe, TrainerFormats
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.training import OptimizerConfig, TrainerConfig
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.lora import Trained, join, split
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import split_batch
from fp8rl_jax.precision import QuantizationSums, join_sums
from fp8rl_jax.rl.metrics import per_token
from fp8rl_jax.training.batch import Batch, Narrowed, narrow, of_width, untrim
from fp8rl_jax.training.gradients import check_gradients
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.state import TrainState, kept_masters, learning_rate, make_optimizer
from fp8rl_jax.training.step import (
    StepConfig,
    batch_logprobs,
    correct,
    observed_update,
    update,
)


class MiniBatch(NamedTuple):
    """One mini-batch as its update met it: log-probabilities of the trainer, and of passes in which
    nothing is quantized."""

    batch: Batch
    logprobs: Float[Array, "b t"]
    unquantized_logprobs: Float[Array, "b t"]
    unquantized_old_logprobs: Float[Array, "b t"]


def due(state: TrainState, config: RLConfig, updates_per_rollout: int) -> bool:
    """Tell whether the step that begins with `state` calibrates."""
    settings = config.clip_calibration
    return settings.enabled and (int(state.updates) // updates_per_rollout) % settings.every == 0


def unquantized(config: StepConfig) -> StepConfig:
    """Configure the same forward in the compute dtype."""
    compute = {
        "trainer": TrainerFormats(),
        "output_gradient": COMPUTE,
        "saved_activation": COMPUTE,
        "layers": (),
        "exact": False,
    }
    recipe = replace(config.recipe, **compute)
    return replace(config, recipe=recipe)


@partial(jax.jit, static_argnames="config")
def recalibrate(
    bounds: Float[Array, " bounds"], calibration: list[MiniBatch], config: RLConfig
) -> tuple[Float[Array, " bounds"], dict[str, Float[Array, ""]]]:
    """Compute the next bounds from those in force and all mini-batches together.

    Also gives the metrics of `rl.calibrated_bounds`.

    A bound that is not finite, for which NaN log-probabilities are the only reason, stays what it
    is.
    """
    columns = []
    for batch, logprobs, exact, exact_old in calibration:
        assert batch.old_logprobs is not None  # of several updates
        mask = batch.mask if batch.loss_mask is None else batch.loss_mask
        advantages = per_token(batch.advantages, mask)
        if batch.weights is not None:
            advantages = advantages * batch.weights
        ratios = [
            rl.policy_ratio(new, old, mask, "token")
            for new, old in ((logprobs, batch.old_logprobs), (exact, exact_old))
        ]
        columns.append((*ratios, advantages, mask))
    found, metrics = rl.calibrated_bounds(*map(jnp.concatenate, zip(*columns, strict=True)), config)
    kept, found = config.clip_calibration.smoothing, jnp.where(jnp.isfinite(found), found, bounds)
    return kept * bounds + (1 - kept) * found, metrics


@jax.jit
def _mean(metrics: list[dict[str, Array]]) -> dict[str, Array]:
    return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values)), *metrics)


def step_config(config: RunConfig, recipe: Recipe) -> StepConfig:
    """Collect what the compiled programs of a run's trainer are specialised to.

    Args:
        recipe: resolved.
    """
    return StepConfig(
        recipe=recipe,
        rl=replace(config.rl, correction=config.rl.correction.resolve(recipe.correction)),
        compute_dtype=config.compute_dtype,
        temperature=config.rollout.temperature,
        remat=config.trainer.remat == "layer",
        logprob_chunk=config.trainer.logprob_chunk,
        attention_chunk=config.trainer.attention_chunk,
        backend=config.precision.backend,
        loss_scale=config.trainer.loss_scale.resolve(config.compute_dtype),
        sharpness=config.trainer.sharpness,
    )


def micro_batches(trainer: TrainerConfig, prompts: int) -> int:
    """Count the micro-batches of a whole rollout of so many prompts, those of all its updates."""
    of_update = prompts // trainer.updates_per_rollout
    return of_update // (trainer.micro_batch_prompts or of_update) * trainer.updates_per_rollout


class Learner:
    """The optimizer, the reference policy, and what the compiled update is specialised to.

    Args:
        config: of the run.
        recipe: resolved.
        policy: before the first update; where a KL divergence is wanted, a copy of what is trained
            of it is the reference.
        mesh: batches are on it.
    """

    def __init__(self, config: RunConfig, recipe: Recipe, policy: Policy, mesh: jax.sharding.Mesh):
        self.run, self.trainer, self.mesh = config, config.trainer, mesh
        self.count = config.trainer.updates_per_rollout
        self.config = step_config(config, recipe)
        check_gradients(recipe, mesh, config.trainer.packing, config.rl.objective)
        self.use()
        settings = self.config.rl
        needed = settings.kl_coefficient > 0 or settings.reward_kl.coefficient > 0
        # of what is trained: adapters at their start, beside the frozen base, are the whole
        # reference
        self.reference: Trained | None = (
            kept_masters(jax.tree.map(jnp.copy, split(policy)[0]), recipe) if needed else None
        )

    def use(self, optimizer: OptimizerConfig | None = None, updates: int | None = None) -> None:
        """Take an optimizer, and the number of updates in its schedule; by default the run's."""
        optimizer = optimizer or self.run.optimizer
        updates = self.trainer.steps * self.count if updates is None else updates
        self.optimizer = make_optimizer(optimizer, updates, self.config.recipe)
        self.schedule = learning_rate(optimizer, updates)

    def micro_batches(self, prompts: int) -> int:
        """`micro_batches` of this run's trainer."""
        return micro_batches(self.trainer, prompts)

    def narrow(self, batch: Batch, micro_batches: int) -> Narrowed:
        """Bring a batch into the form that the model runs on, in so many micro-batches."""
        return narrow(batch, self.trainer, micro_batches, self.mesh)

    def with_logprobs(
        self, state: TrainState, batch: Batch, micro_batches: int, clock: Clock
    ) -> Batch:
        """Add the log-probabilities that rewards and updates need.

        The reference policy's, and the old policy's.

        Args:
            micro_batches: as the method counts them.
        """
        config, width = replace(self.config, micro_batches=micro_batches), batch.tokens.shape[1]
        if self.reference is not None:
            with clock.enter("ref"):
                # other weights, so its own experts
                own_routes = replace(
                    self.narrow(batch, micro_batches).batch, prompt_routes=None, routes=None
                )
                policy = join(self.reference, split(state.policy)[1])
                reference = jax.block_until_ready(
                    untrim(batch_logprobs(policy, own_routes, config), width)
                )
            batch = replace(batch, reference_logprobs=reference)
        if (
            self.count > 1
            or config.rl.correction.whole_batch
            or config.rl.reward_kl.coefficient > 0
        ):
            with clock.enter("logprob"):
                old = jax.block_until_ready(
                    untrim(
                        batch_logprobs(
                            state.policy, self.narrow(batch, micro_batches).batch, config
                        ),
                        width,
                    )
                )
            batch = replace(batch, old_logprobs=old)
        return batch

    def update(
        self,
        state: TrainState,
        batch: Batch,
        micro_batches: int,
        clock: Clock,
        scales: KVScales | None = None,
    ) -> tuple[
        TrainState,
        Float[Array, "b t"],
        dict[str, Float[Array, ""] | float],
        QuantizationSums | None,
    ]:
        """Make all updates on one rollout.

        Args:
            batch: from `with_logprobs`, with advantages.
            micro_batches: as the method counts them.
            scales: of the KV cache that was served.

        Returns:
            The next state; the trainer's log-probabilities before the first update; the mean of the
            updates' metrics; and Q, K and V as the updates' forwards met them, where the recipe
            calibrates on these.
        """
        update = partial(self._one, scales=scales)
        old, width = batch.old_logprobs, batch.tokens.shape[1]
        rl_config = of_width(self.config.rl, width)
        config = replace(self.config, rl=rl_config, micro_batches=micro_batches // self.count)
        batch, padding = self.narrow(batch, micro_batches)
        metrics_of_batch = {
            "optim/lr": float(jnp.asarray(self.schedule(int(state.updates)))),
            "perf/padding_fraction": padding,
        }
        if old is None:
            with clock.enter("train"):
                state, logprobs, metrics, seen = update(state, batch, config)
                jax.block_until_ready(logprobs)
            return state, untrim(logprobs, width), metrics | metrics_of_batch, seen
        corrected, corrections = correct(batch, config.rl)
        collected, calibration, minis = [], [], split_batch(corrected, self.count)
        observed = []
        calibrating, without = due(state, config.rl, self.count), unquantized(config)
        if calibrating:
            with clock.enter("calibrate"):
                whole = replace(without, micro_batches=micro_batches)
                unquantized_old = split_batch(
                    jax.block_until_ready(batch_logprobs(state.policy, batch, whole)), self.count
                )
        for i in range(self.count):
            mini = jax.tree.map(lambda x, i=i: x[i], minis)
            if calibrating and i:
                with clock.enter("calibrate"):
                    unquantized_logprobs = jax.block_until_ready(
                        batch_logprobs(state.policy, mini, without)
                    )
            with clock.enter("train"):
                state, logprobs, metrics, seen = jax.block_until_ready(update(state, mini, config))
            collected.append(metrics)
            observed.append(seen)
            if calibrating and i:
                calibration.append(
                    MiniBatch(mini, logprobs, unquantized_logprobs, unquantized_old[i])
                )
        averaged = _mean(collected)
        if calibrating:
            bounds, found = recalibrate(state.clip_bounds, calibration, config.rl)
            state, metrics_of_batch = replace(state, clip_bounds=bounds), metrics_of_batch | found
        metrics = averaged | rl.metric_values(corrections) | metrics_of_batch
        return state, old, metrics, None if observed[0] is None else join_sums(observed)

    def _one(
        self, state: TrainState, batch: Batch, config: StepConfig, scales: KVScales | None
    ) -> tuple[TrainState, Float[Array, "b t"], dict[str, Array], QuantizationSums | None]:
        recipe = config.recipe
        if recipe.quantizes_cache and recipe.kv_calibration == "update":
            return observed_update(state, batch, config, self.optimizer, scales)
        return *update(state, batch, config, self.optimizer), None

"""What a run carries from one update to the next: masters, optimizer state, and what a run finds on
the way: the loss scale of float16 and calibrated clip bounds.

Data order and sampling are functions of (seed, step), so a run resumed from this state repeats the
uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.formats import FLOAT32
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.schema import report
from fp8rl_jax.config.training import LossScaleConfig, OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.lora import Trained, join, split
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import policy_shardings, shard_policy
from fp8rl_jax.training.gradients import Factors, init_factors, next_factors
from fp8rl_jax.training.gradients import metrics as gradient_metrics
from fp8rl_jax.training.kept import (
    format_for,
    is_float32,
    is_kept,
    leaves,
    load,
    loaded,
    matrices,
    store,
)
from fp8rl_jax.training.loss_scale import LossScale, factor, init_scale, next_scale
from fp8rl_jax.training.optimizer import OPTIMIZERS, Numbers, Optimizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a run carries.

    Attributes:
        policy: masters as they are kept (recipe.master), layers stacked; with adapters, the frozen
            base among them. Within an update, what is trained and nothing else.
        optimizer: its state, of what is trained (models.lora.split).
        updates: optimizer updates tried so far, int32 (a skipped one counts: schedules follow the
            data).
        loss_scale: where it is dynamic, else None; a checkpoint has it in the first case only.
        clip_bounds: of the ratio, where they are calibrated; likewise.
        gradient_factors: of weight gradients that are scaled automatically (training/gradients.py);
            likewise.
    """

    policy: Any
    optimizer: Any
    updates: Int[Array, ""]
    loss_scale: LossScale | None = None
    clip_bounds: Float[Array, " bounds"] | None = None
    gradient_factors: Factors | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["peak"],
    meta_fields=["kind", "warmup_steps", "final_ratio", "updates"],
)
@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then constant, linear or cosine: the rate as a function of updates made.

    A decay ends at `final_ratio` of the peak, behind the last of `updates`. The peak is an argument
    of compiled programs and no part of them: runs that differ in it alone compile once.
    """

    peak: ArrayLike
    kind: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    final_ratio: float
    updates: int

    def __call__(self, count: Any) -> Any:
        """Compute the rate of the update behind `count` others."""
        peak: Any = self.peak
        decay_updates = max(self.updates - self.warmup_steps, 1)
        match self.kind:
            case "constant":
                main = optax.constant_schedule(peak)
            case "linear":
                main = optax.linear_schedule(peak, peak * self.final_ratio, decay_updates)
            case "cosine":
                main = optax.cosine_decay_schedule(peak, decay_updates, self.final_ratio)
        if self.warmup_steps == 0:
            return main(count)
        warmup = optax.linear_schedule(
            peak / self.warmup_steps, peak, max(self.warmup_steps - 1, 1)
        )
        return optax.join_schedules([warmup, main], [self.warmup_steps])(count)


def learning_rate(config: OptimizerConfig, updates: int) -> LearningRate:
    """Make the schedule that the configuration names, for a run of so many updates."""
    return LearningRate(
        np.float32(config.learning_rate),
        config.schedule,
        config.warmup_steps,
        config.final_ratio,
        1 if config.schedule == "constant" else updates,
    )


def decay_mask(policy: Trained) -> Trained:
    """Choose what is decayed: the linears' matrices, not norms and embeddings."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "_proj" in jax.tree_util.keystr(path), policy
    )


def make_optimizer(
    config: OptimizerConfig,
    updates: int,
    recipe: Recipe = Recipe("float32"),  # noqa: B008  # frozen
) -> Optimizer:
    """Make the optimizer that the configuration names.

    Args:
        updates: of the whole run, for the schedule.
        recipe: of the run, whose STATE_ROLES say how the state is kept; default: in float32.

    Raises:
        UserError: whatever the optimizer refuses; settings out of their range.
    """
    report(*config.faults("optimizer", recipe))
    if updates < 1:
        raise UserError(f"updates = {updates} of a schedule must be at least 1")
    schedule = learning_rate(config, updates)
    return OPTIMIZERS[config.name](Numbers.of(config), schedule, decay_mask, recipe)


def kept_masters(trained: Trained, recipe: Recipe) -> Trained:
    """Bring float32 masters into the form that they are kept in; those that are in it stay."""
    if recipe.master == FLOAT32 or not all(map(is_float32, leaves(trained))):
        return trained
    return _packed(trained, recipe)


@partial(jax.jit, static_argnums=1)
def _packed(trained: Trained, recipe: Recipe) -> Trained:
    tensors, treedef = jax.tree.flatten(trained)
    kept = [
        store(x, format_for(recipe.master, matrix), jax.random.key(0))
        for x, matrix in zip(tensors, matrices(trained), strict=True)
    ]
    return jax.tree.unflatten(treedef, kept)


def float32_masters(policy: Policy) -> Policy:
    """The policy with float32 masters, as everything computes with it; it itself where they are
    kept so."""
    trained, frozen = split(policy)
    if all(map(is_float32, leaves(trained))):
        return policy
    return join(_loaded(trained), frozen)


_loaded = jax.jit(loaded)


def init_state(
    policy: Policy, optimizer: Optimizer, scaling: LossScaleConfig | None = None
) -> TrainState:
    """Make a state before the first update; `scaling` as in `apply_gradients`."""
    trained, frozen = split(policy)
    state = _state_of(trained, optimizer, scaling)
    return replace(state, policy=join(state.policy, frozen))


def _state_of(
    trained: Trained, optimizer: Optimizer, scaling: LossScaleConfig | None
) -> TrainState:
    """A state before the first update, of what is trained."""
    masters = kept_masters(trained, optimizer.recipe)
    return TrainState(
        masters,
        optimizer.init(masters),
        jnp.int32(0),
        init_scale(scaling),
        gradient_factors=init_factors(masters, optimizer.recipe),
    )


def sharded_state(
    policy: Policy,
    optimizer: Optimizer,
    mesh: jax.sharding.Mesh,
    scaling: LossScaleConfig | None = None,
    clip_bounds: tuple[float, float] | None = None,
) -> TrainState:
    """Make a state with every leaf placed on the mesh.

    The optimizer's moments lie like their weights; a frozen base stays.

    Args:
        clip_bounds: at the start, where they are calibrated.
    """
    trained, frozen = split(policy)

    def make(trained: Any) -> TrainState:
        bounds = None if clip_bounds is None else jnp.asarray(clip_bounds, jnp.float32)
        return replace(_state_of(trained, optimizer, scaling), clip_bounds=bounds)

    state = jax.jit(make, out_shardings=policy_shardings(jax.eval_shape(make, trained), mesh))(
        trained
    )
    return replace(state, policy=join(state.policy, shard_policy(frozen, mesh)))


def scaled_loss(
    loss: Float[Array, ""], state: TrainState, scaling: LossScaleConfig | None
) -> Float[Array, ""]:
    """Scale the loss that the backward pass starts from.

    `apply_gradients` expects the gradients of it.
    """
    scale = factor(state.loss_scale, scaling)
    return loss if scale is None else loss * scale


def apply_gradients(
    state: TrainState,
    gradients: Any,
    loss: Float[Array, ""],
    optimizer: Optimizer,
    scaling: LossScaleConfig | None = None,
    saturated: Factors | None = None,
    learns: Bool[Array, ""] | bool = True,
) -> tuple[TrainState, dict[str, Array]]:
    """Make one update, or none where a value is not finite.

    Args:
        state: its policy is what is trained and nothing else.
        gradients: of `scaled_loss`, as they are kept.
        loss: not scaled.
        scaling: loss scaling, resolved; None: gradients are those of the loss.
        saturated: of gradients that are scaled automatically, what `weight_gradients` found.
        learns: False where nothing is in the loss: then momentum alone moves no weight.

    Returns:
        The next state, and `optim/grad_norm` (before clipping), `optim/skipped` (0 or 1), and a
        flag a role that is 1 where it held a non-finite value: `nonfinite/loss`,
        `nonfinite/gradient`, `nonfinite/weight` (a weight after the update; its tensor keeps the
        values that it had, so that the old and the new weights never exist side by side). With loss
        scaling also `optim/loss_scale`, the scale of this update; and where that is dynamic
        `optim/overflow`, 1 where the gradients of a finite loss overflowed with a scale above 1.
        Then the next scale is lower, `optim/skipped` is 1, and `nonfinite/gradient`, which is for
        faults that scaling cannot cause, is 0. With gradients that are scaled automatically also
        what `gradients.metrics` has.
    """
    scale = factor(state.loss_scale, scaling)
    if scale is not None:
        gradients = jax.tree.map(lambda g: load(g) / scale, gradients, is_leaf=is_kept)
    norm = optax.tree.norm(loaded(gradients))
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    policy, moments, fits = optimizer.step(
        state.policy, gradients, state.optimizer, norm, state.updates, keep=sound & learns
    )
    finite = {
        "loss": jnp.isfinite(loss),
        "gradient": jnp.isfinite(norm),
        "weight": fits,
    }
    skipped = ~(sound & finite["weight"])
    flags = {f"nonfinite/{role}": (~ok).astype(jnp.float32) for role, ok in finite.items()}
    metrics = {"optim/grad_norm": norm, "optim/skipped": skipped.astype(jnp.float32), **flags}
    following = state.loss_scale
    if scale is not None:
        metrics["optim/loss_scale"] = jnp.float32(scale)
    if following is not None:
        assert scale is not None and scaling is not None
        overflow = (finite["loss"] & ~finite["gradient"] & (scale > 1)).astype(jnp.float32)
        metrics |= {
            "optim/overflow": overflow,
            "nonfinite/gradient": flags["nonfinite/gradient"] - overflow,
        }
        following = next_scale(following, finite["gradient"], scaling)
    factors = state.gradient_factors
    if factors is not None and saturated is not None:
        metrics |= gradient_metrics(factors, saturated)
        factors = next_factors(factors, saturated, finite["gradient"])
    return replace(
        state,
        policy=policy,
        optimizer=moments,
        updates=state.updates + 1,
        loss_scale=following,
        gradient_factors=factors,
    ), metrics

"""What a run carries from one update to the next: float32 masters, optimizer state, and nothing else.

Data order and sampling are functions of (seed, step), so a run resumed from this state repeats the uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fp8rl_jax.config.run import OptimizerConfig
from fp8rl_jax.models.lora import Trained, join, split
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import policy_shardings, shard_policy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Attributes:
    policy: float32 masters, layers stacked; with adapters, the frozen base among them.
    optimizer: optax state of what is trained (models.lora.split).
    updates: optimizer updates tried so far, int32 (a skipped one counts: schedules follow the data).
    """

    policy: Trained
    optimizer: Any
    updates: Int[Array, ""]


def learning_rate(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """Linear warm-up, then constant, or linear or cosine decay to final_ratio of the peak at the last of `updates`."""
    peak, last = config.learning_rate, config.learning_rate * config.final_ratio
    decay_updates = max(updates - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            main = optax.constant_schedule(peak)
        case "linear":
            main = optax.linear_schedule(peak, last, decay_updates)
        case "cosine":
            main = optax.cosine_decay_schedule(peak, decay_updates, config.final_ratio)
    if config.warmup_steps == 0:
        return main
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, main], [config.warmup_steps])


def decay_mask(policy: Trained) -> Trained:
    """True for the linears' matrices: norms and embeddings are not decayed."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "_proj" in jax.tree_util.keystr(path), policy)


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) behind global-norm clipping."""
    adamw = optax.adamw(
        learning_rate(config, updates), config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decay_mask
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw) if config.max_grad_norm > 0 else adamw


def init_state(policy: Policy, optimizer: optax.GradientTransformation) -> TrainState:
    """A state before the first update."""
    return TrainState(policy, optimizer.init(split(policy)[0]), jnp.int32(0))


def sharded_state(policy: Policy, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> TrainState:
    """`init_state` with every leaf placed on the mesh, the optimizer's moments like their weights; a frozen base stays."""
    trained, frozen = split(policy)

    def make(trained: Trained) -> TrainState:
        return TrainState(trained, optimizer.init(trained), jnp.int32(0))

    state = jax.jit(make, out_shardings=policy_shardings(jax.eval_shape(make, trained), mesh))(trained)
    return replace(state, policy=join(state.policy, shard_policy(frozen, mesh)))


def apply_gradients(
    state: TrainState, gradients: Trained, loss: Array, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, Array]]:
    """One update, or none where a value is not finite.

    Args:
        state: its policy is what is trained and nothing else.

    Returns:
        The next state, and `optim/grad_norm` (before clipping), `optim/skipped` (0 or 1), and a flag a role that is 1 where
        it held a non-finite value: `nonfinite/loss`, `nonfinite/gradient`, `nonfinite/weight` (after the update).
    """
    updates, next_optimizer = optimizer.update(gradients, state.optimizer, state.policy)
    policy = optax.apply_updates(state.policy, updates)
    norm = optax.tree.norm(gradients)
    finite = {"loss": jnp.isfinite(loss), "gradient": jnp.isfinite(norm), "weight": jnp.isfinite(optax.tree.norm(policy))}
    keep = finite["loss"] & finite["gradient"] & finite["weight"]

    def choose(new, old):
        return jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)

    flags = {f"nonfinite/{role}": (~ok).astype(jnp.float32) for role, ok in finite.items()}
    metrics = {"optim/grad_norm": norm, "optim/skipped": (~keep).astype(jnp.float32), **flags}
    return TrainState(choose(policy, state.policy), choose(next_optimizer, state.optimizer), state.updates + 1), metrics

"""LoRA in a run: from a loaded model to an adapted policy, and what a checkpoint holds of it.

The base never changes, so a checkpoint has what is trained, its moments, and checksums of the base:
a few megabytes, and a run that is resumed on another base is refused instead of going on as a
different policy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fp8rl_jax.config.formats import COMPUTE, TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError, switch
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import quantized_base
from fp8rl_jax.models.lora import Trained, init_adapters, join, norms_of, split
from fp8rl_jax.models.policy import Policy, cast, linear_names
from fp8rl_jax.parallel import checksums, to_host
from fp8rl_jax.precision import describe, quantized_layers
from fp8rl_jax.training.state import TrainState
from fp8rl_jax.weights.peft_format import load_adapters


def base_formats(config: RunConfig, shape: PolicyConfig) -> dict[str, TensorFormat]:
    """What a frozen base rests in, by path, of stacks that have one format in all layers; nothing
    where it rests in the compute dtype."""
    if config.lora.rank == 0 or config.lora.base == "compute":
        return {}
    recipe, names = config.resolved_recipe, linear_names(shape)
    quantized, stacks = {*quantized_layers(recipe, names)}, defaultdict(set)
    for name in names:
        fmt = recipe.of_linear(name).rollout.weight if name in quantized else COMPUTE
        stacks[f"layers.{name.split('.', 2)[2]}.weight"].add(fmt)
    found = {path: formats.pop() for path, formats in stacks.items() if len(formats) == 1}
    return {path: fmt for path, fmt in found.items() if fmt.quantized}


def adapted_shapes(
    policy: Policy, config: RunConfig, recipe: Recipe
) -> tuple[Trained, Policy | None]:
    """Find the shapes of what is trained of a policy and of what is frozen, as `adapt` and `split`
    give them.

    Args:
        policy: of shapes.
        config, recipe: as in `adapt`. An adapter's file, which is not read, has the shapes of a new
            one.
    """
    fresh = replace(config, lora=replace(config.lora, path=""))
    return split(jax.eval_shape(partial(adapt, config=fresh, recipe=recipe), policy))


def adapt(policy: Policy, config: RunConfig, recipe: Recipe) -> Policy:
    """Freeze a policy's weights in `lora.base`'s format, with adapters beside them, and norms that
    are trained in full (`lora.norms`).

    The policy as it is where the rank is 0.

    Args:
        policy: float32, layers stacked.
        recipe: the run's; with `lora.base` "rollout" the base takes its rollout weight format.

    Raises:
        UserError: targets, norms or a rank that the model cannot have, an adapter file that does
            not fit, or one base for two sides whose weight formats differ.
    """
    lora, dtype = config.lora, jnp.dtype(config.compute_dtype)
    if lora.rank == 0:
        return policy
    if lora.path:
        adapters = load_adapters(lora.path, policy.config, lora)
    else:  # of the seed's keys, 0 and 1 are the rollout's and the evaluation's
        adapters = init_adapters(
            policy.config, lora, jax.random.fold_in(jax.random.key(config.seed), 2)
        ) | norms_of(policy, lora)
    if lora.base == "compute":
        return join(adapters, jax.jit(cast, static_argnums=1)(policy, dtype))
    for variant in recipe.variants:
        rollout, trainer = variant.rollout.weight, variant.trainer.weight
        if rollout.quantized and trainer.quantized and rollout != trainer:
            raise UserError(
                f'lora.base: "rollout" is one base for both sides, and recipe {recipe.name!r} has '
                f"weights of {describe(rollout)} in "
                f'the rollout and of {describe(trainer)} in the trainer; use "compute"'
            )
    freeze = partial(quantized_base, recipe=recipe, dtype=dtype, backend=config.precision.backend)
    return join(adapters, jax.jit(freeze)(policy))


def to_save(state: TrainState) -> tuple:
    """Give what a checkpoint holds of a state.

    All of it, or with adapters what is trained, and the base's checksums.
    """
    trained, frozen = split(state.policy)
    return (state,) if frozen is None else (replace(state, policy=trained), checksums(frozen))


def restored(state: TrainState, saved: TrainState, saved_base: Array | None = None) -> TrainState:
    """Rebuild the state that `to_save` was given, on the base of `state`.

    Raises:
        UserError: the checkpoint's base was another.
    """
    frozen = split(state.policy)[1]
    if frozen is None:
        return saved
    if not np.array_equal(to_host(saved_base), to_host(checksums(frozen))):
        raise UserError(
            f"{switch('resume')}: the checkpoint's adapters were trained on another base; resume "
            "with the run's own model.path, seed, compute_dtype, recipe and lora.base"
        )
    return replace(saved, policy=join(saved.policy, frozen))

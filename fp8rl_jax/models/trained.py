"""The trainer's form of a policy: compute dtype, and the recipe's linears as FP8 weights with a gradient."""

from __future__ import annotations

import jax.numpy as jnp

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.hf_names import stack_of
from fp8rl_jax.models.lora import Adapted
from fp8rl_jax.models.policy import Layer, Policy, Weight, WeightRuns, cast, in_runs, linear_names, with_layers
from fp8rl_jax.precision import frozen_weight, is_quantized, quantized_layers, trained_weight
from pallas_kernels.backend import Backend


def quantized_tensors(policy: Policy, recipe: Recipe) -> dict[str, list[bool]]:
    """For each linear that the recipe quantizes, in which entries of its stack: {"q_proj": [False, True, True], ...}.

    Raises:
        UserError: a pattern of the recipe matches nothing.
    """
    chosen: dict[str, set[int]] = {}
    for linear in quantized_layers(recipe, linear_names(policy.config)):
        _, i, name = linear.split(".", 2)
        chosen.setdefault(name, set()).add(int(i))
    return {name: [i in layers for i in stack_of(policy.config, name)] for name, layers in chosen.items()}


def trainer_policy(policy: Policy, recipe: Recipe, dtype: jnp.dtype, backend: Backend = "auto") -> Policy:
    """What the trainer's forward runs on: `cast(policy, dtype)`, and each of the recipe's linears a TrainedWeight.

    A linear that is quantized in some layers only comes in runs (WeightRuns), cut out of the one stack that has the gradient.
    The weights are quantized here, once, whatever the number of forwards that share them. What is frozen has no gradient: linears
    that are quantized already (a rollout's policy, a base that rests in FP8), and all of a policy with adapters.

    Args:
        policy: float32 masters, layers stacked; adapters on a frozen base; or a rollout's.
        recipe: its trainer formats.
        dtype: compute dtype of what is not quantized.

    Raises:
        UserError: a pattern matches nothing.
    """
    served = cast(policy, dtype)
    if not recipe.trainer.weight.quantized or not policy.stacked:
        return served
    chosen = quantized_tensors(policy, recipe)
    tensors, masters = served.layers.tensors(), policy.layers.tensors()
    adapted = any(isinstance(weight, Adapted) for weight in masters.values())

    def quantized(weight: Weight, master: Weight) -> Weight:
        form = frozen_weight if adapted or is_quantized(master.value) else trained_weight
        return Weight(form(master.value, recipe, backend), weight.axes)

    def changed(weight: Weight | Adapted, master: Weight | Adapted, layers: list[bool]) -> Weight | WeightRuns | Adapted:
        if isinstance(weight, Adapted):
            return Adapted(changed(weight.base, master.base, layers), weight.adapter)
        return in_runs(layers, quantized, weight, master)

    linears = {name: changed(tensors[name], masters[name], layers) for name, layers in chosen.items()}
    return with_layers(served, Layer(tensors | linears))

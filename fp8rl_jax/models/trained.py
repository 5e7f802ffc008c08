"""The trainer's form of a policy: compute dtype, and the recipe's linears as FP8 weights with a gradient."""

from __future__ import annotations

import jax.numpy as jnp

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.hf_names import stack_of
from fp8rl_jax.models.lora import Adapted, has_adapters
from fp8rl_jax.models.policy import EXPERT_LINEARS, LINEARS, Layer, Policy, Weight, cast, linear_names, with_layers
from fp8rl_jax.precision import AdaptedWeight, QTensor, frozen_weight, is_quantized, quantized_layers, trained_weight
from pallas_kernels.backend import Backend


def quantized_tensors(policy: Policy, recipe: Recipe) -> dict[str, set[int]]:
    """The layers in which each linear takes the recipe's weight format: {"q_proj": {0, 1}, ...}.

    Raises:
        UserError: a pattern of the recipe matches nothing.
    """
    chosen: dict[str, set[int]] = {}
    for linear in quantized_layers(recipe, linear_names(policy.config)):
        _, i, name = linear.split(".", 2)
        chosen.setdefault(name, set()).add(int(i))
    return chosen


def check_uniform(policy: Policy, chosen: dict[str, set[int]], remedy: str) -> None:
    """Layers that are scanned have one program, so a linear must be quantized in all of them or in none.

    Raises:
        UserError: naming the first linear that differs between layers, and `remedy`.
    """
    for name, layers in chosen.items():
        if missing := sorted(set(stack_of(policy.config, name)) - layers):
            raise UserError(f"{name} is quantized in some layers and not in layer {missing[0]}; {remedy}")


def trainer_policy(policy: Policy, recipe: Recipe, dtype: jnp.dtype, backend: Backend = "auto") -> Policy:
    """What the trainer's forward runs on: `cast(policy, dtype)`, and each of the recipe's linears a TrainedWeight.

    The weights are quantized here, once, whatever the number of forwards that share them. What is frozen has no gradient: linears
    that are quantized already (a rollout's policy, a base that rests in FP8), and all of a policy with adapters.

    Args:
        policy: float32 masters, layers stacked; adapters on a frozen base; or a rollout's.
        recipe: its trainer formats.
        dtype: compute dtype of what is not quantized.

    Raises:
        UserError: a pattern matches nothing, or the layers differ in what is quantized.
    """
    served = cast(policy, dtype)
    if not recipe.trainer.weight.quantized or not policy.stacked:
        return served
    chosen = quantized_tensors(policy, recipe)
    check_uniform(policy, chosen, "a trainer in FP8 scans its layers, so precision.excluded must name all of them or none")
    tensors, masters = served.layers.tensors(), policy.layers.tensors()
    adapted = any(isinstance(weight, Adapted) for weight in masters.values())

    def quantized(weight: Weight | Adapted, master: Weight | Adapted) -> Weight | Adapted:
        if isinstance(weight, Adapted):
            return Adapted(quantized(weight.base, master.base), weight.adapter)
        form = frozen_weight if adapted or is_quantized(master.value) else trained_weight
        return Weight(form(master.value, recipe, backend), weight.axes)

    return with_layers(served, Layer(tensors | {name: quantized(tensors[name], masters[name]) for name in chosen}))


def check_form(policy: Policy, recipe: Recipe, phase: str) -> None:
    """Refuses a policy whose linears are not in the form that this side of the recipe multiplies.

    A product follows the type of its weight, so plain arrays under a recipe in FP8 would give the numbers of bf16 without a word,
    and quantized weights under a side that has none those of weight-only quantization; a rollout's weights under a trainer in FP8
    give its numbers, and gradients that stop at them. The frozen base of a policy with adapters may rest in FP8 under any recipe.
    Types alone are looked at, when a program is traced: what is compiled has nothing of it.

    Args:
        phase: of `forward`; "train" is the trainer's side of the recipe, any other the rollout's.

    Raises:
        ValueError: naming the first linear, and what puts a policy into the form.
    """
    side, formats = ("trainer", recipe.trainer) if phase == "train" else ("rollout", recipe.rollout)
    chosen = quantized_tensors(policy, recipe) if formats.weight.quantized else {}
    layers, frozen = [policy.layers] if policy.stacked else list(policy.layers), has_adapters(policy)
    for i, layer in enumerate(layers):
        for name, weight in layer.tensors().items():
            if name not in (*LINEARS, *EXPERT_LINEARS):
                continue
            value = weight.value.base if isinstance(weight.value, AdaptedWeight) else weight.value
            # an unrolled policy has no trainer's form: a rollout's is measured as it is, and not differentiated
            blocks_gradients = phase == "train" and policy.stacked and isinstance(value, QTensor)
            for place in stack_of(policy.config, name) if policy.stacked else (i,):
                where, wanted = f"layers.{place}.{name}", place in chosen.get(name, ())
                if wanted and not is_quantized(value):
                    fault = f"quantizes {where}, which is plain in this policy"
                elif wanted and blocks_gradients:
                    fault = f"quantizes {where}, which is in the rollout's form in this policy and lets no gradient through"
                elif is_quantized(value) and not wanted and not frozen:
                    fault = f"does not quantize {where}, which is quantized in this policy"
                else:
                    continue
                raise ValueError(
                    f"forward: the {side} of recipe {recipe.name!r} {fault}; {_FORMS[side]} makes the form of phase {phase!r}"
                )


_FORMS = {
    "trainer": "models.trained.trainer_policy, of the policy that is trained, its layers stacked,",
    "rollout": "rollout.served.quantized_policy, or LocalEngine.sync, of the unquantized policy",
}

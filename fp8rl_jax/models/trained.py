"""The trainer's form of a policy: compute dtype, and the recipe's linears as FP8 weights with a
gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.config import stack_of
from fp8rl_jax.models.lora import Adapted
from fp8rl_jax.models.policy import (
    EXPERT_LINEARS,
    LINEARS,
    Layer,
    Policy,
    Weight,
    WeightRuns,
    cast,
    equal_runs,
    in_runs,
    linear_names,
    run_of_layers,
    with_layers,
)
from fp8rl_jax.precision import (
    AdaptedWeight,
    QTensor,
    frozen_weight,
    is_quantized,
    quantized_layers,
    trained_weight,
)
from pallas_kernels.backend import Backend


def quantized_tensors(policy: Policy, recipe: Recipe) -> dict[str, list[bool]]:
    """For each linear that the recipe quantizes, in which entries of its stack: {"q_proj": [False,
    True, True], ...}.

    Raises:
        UserError: a pattern of the recipe matches nothing.
    """
    chosen: dict[str, set[int]] = {}
    for linear in quantized_layers(recipe, linear_names(policy.config)):
        _, i, name = linear.split(".", 2)
        chosen.setdefault(name, set()).add(int(i))
    return {
        name: [i in layers for i in stack_of(policy.config, name)]
        for name, layers in chosen.items()
    }


def trainer_policy(
    policy: Policy, recipe: Recipe, dtype: jnp.dtype, backend: Backend = "auto"
) -> Policy:
    """What the trainer's forward runs on: `cast(policy, dtype)`, and each of the recipe's linears a
    TrainedWeight.

    A linear that is quantized in some layers only comes in runs (WeightRuns), cut out of the one
    stack that has the gradient. The weights are quantized here, once, whatever the number of
    forwards that share them. What is frozen has no gradient: linears that are quantized already (a
    rollout's policy, a base that rests in FP8), and all of a policy with adapters.

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

    def changed(
        weight: Weight | Adapted, master: Weight | Adapted, layers: list[bool]
    ) -> Weight | WeightRuns | Adapted:
        if isinstance(weight, Adapted):
            return Adapted(changed(weight.base, master.base, layers), weight.adapter)
        return in_runs(layers, quantized, weight, master)

    linears = {
        name: changed(tensors[name], masters[name], layers) for name, layers in chosen.items()
    }
    return with_layers(served, Layer(tensors | linears))


def check_form(policy: Policy, recipe: Recipe, phase: str) -> None:
    """Refuses a policy whose linears are not in the form that this side of the recipe multiplies.

    A product follows the type of its weight, so plain arrays under a recipe in FP8 would give the
    numbers of bf16 without a word, and quantized weights under a side that has none those of
    weight-only quantization; a rollout's weights under a trainer in FP8 give its numbers, and
    gradients that stop at them. The frozen base of a policy with adapters may rest in FP8 under any
    recipe. Types alone are looked at, when a program is traced: what is compiled has nothing of it.

    Args:
        phase: of `forward`; "train" is the trainer's side of the recipe, any other the rollout's.

    Raises:
        ValueError: naming the first linear, and what puts a policy into the form.
    """
    side, formats = ("trainer", recipe.trainer) if phase == "train" else ("rollout", recipe.rollout)
    chosen = quantized_tensors(policy, recipe) if formats.weight.quantized else {}
    runs = (
        equal_runs(policy)
        if policy.stacked
        else [range(i, i + 1) for i in range(policy.config.num_layers)]
    )
    layers = policy.layers
    if policy.stacked:
        layers = jax.eval_shape(
            lambda p: [run_of_layers(p, run.start, run.stop) for run in runs], policy
        )
    frozen = any(
        isinstance(weight.value, AdaptedWeight)
        for layer in layers
        for weight in layer.tensors().values()
    )
    for run, layer in zip(runs, layers, strict=True):
        for name, weight in layer.tensors().items():
            if name not in (*LINEARS, *EXPERT_LINEARS):
                continue
            value = weight.value.base if isinstance(weight.value, AdaptedWeight) else weight.value
            stack = stack_of(policy.config, name)
            # an unrolled policy has no trainer's form: a rollout's is measured as it is, and not
            # differentiated
            blocks_gradients = phase == "train" and policy.stacked and isinstance(value, QTensor)
            for place in run:
                where, wanted = (
                    f"layers.{place}.{name}",
                    name in chosen and chosen[name][stack.index(place)],
                )
                if wanted and not is_quantized(value):
                    fault = f"quantizes {where}, which is plain in this policy"
                elif wanted and blocks_gradients:
                    fault = (
                        f"quantizes {where}, which is in the rollout's form in this policy "
                        "and lets no gradient through"
                    )
                elif is_quantized(value) and not wanted and not frozen:
                    fault = f"does not quantize {where}, which is quantized in this policy"
                else:
                    continue
                raise ValueError(
                    f"forward: the {side} of recipe {recipe.name!r} {fault}; {_FORMS[side]} "
                    f"makes the form of phase {phase!r}"
                )


_FORMS = {
    "trainer": "models.trained.trainer_policy, of the policy that is trained, its layers stacked,",
    "rollout": "rollout.served.quantized_policy, or LocalEngine.sync, of the unquantized policy",
}

"""The rollout's form of a policy: what a weight sync makes of the trainer's weights, and whether it
is finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import PolicyConfig, stack_of
from fp8rl_jax.models.lora import Adapters, unstack_adapters
from fp8rl_jax.models.policy import Layer, Policy, Weight, cast, in_runs, unstack, with_layers
from fp8rl_jax.models.trained import quantized_tensors
from fp8rl_jax.precision import (
    QTensor,
    QuantizationSums,
    is_finite,
    is_quantized,
    quantize_weight,
    stack_sums,
    weight_sums,
)
from pallas_kernels.backend import Backend
from pallas_kernels.rounding import rounded


def quantized_policy(
    policy: Policy,
    recipe: Recipe,
    dtype: jnp.dtype,
    unroll: bool,
    backend: Backend = "auto",
) -> tuple[Policy, dict[str, Float[Array, ""]]]:
    """The rollout's form of `policy`: compute dtype, the recipe's linears quantized, layers
    unrolled or stacked.

    Args:
        policy: layers stacked, no adapters; weights that are quantized already stay as they are.
        unroll: a list of single layers; else they stay stacked, and a linear that is quantized in
            some only comes in runs.

    Returns:
        The policy, and what quantization did to its weights (fp8/*_weight); no metrics where
        nothing is quantized.

    Raises:
        UserError: a pattern matches nothing.
    """
    chosen = quantized_tensors(policy, recipe) if recipe.rollout.weight.quantized else {}
    fmt = recipe.rollout.weight
    served = cast(policy, dtype)
    sums: list[QuantizationSums] = []

    def quantized(weight: Weight, master: Weight) -> Weight:
        if is_quantized(master.value):
            return weight
        made = quantize_weight(master.value, fmt, backend)
        sums.append(weight_sums(master.value, made))
        return Weight(made, weight.axes)

    def replaced(layer: Layer, master: Layer, chosen: dict[str, list[bool]]) -> Layer:
        tensors, masters = layer.tensors(), master.tensors()
        return Layer(
            tensors
            | {n: in_runs(flags, quantized, tensors[n], masters[n]) for n, flags in chosen.items()}
        )

    if unroll:
        served, masters = unstack(served), unstack(policy)
        layers = []
        for i, pair in enumerate(zip(served.layers, masters.layers, strict=True)):
            stacks = {name: stack_of(policy.config, name) for name in chosen}
            here = {
                name: [True]
                for name, stack in stacks.items()
                if i in stack and chosen[name][stack.index(i)]
            }
            layers.append(replaced(*pair, here))
        layers = nnx.List(layers)
    else:
        layers = replaced(served.layers, policy.layers, chosen)
    return with_layers(served, layers), stack_sums(sums).metrics("weight") if sums else {}


def served_adapters(
    adapters: Adapters, config: PolicyConfig, dtype: jnp.dtype, unroll: bool
) -> Adapters | list[Adapters]:
    """The rollout's form of adapters: the compute dtype, laid out like the layers."""
    served = jax.tree.map(lambda x: rounded(x, dtype), adapters)
    return unstack_adapters(served, config) if unroll else served


def finite_flags(policy: Policy, scales: KVScales | None) -> dict[str, Bool[Array, ""]]:
    """One flag a tensor role, True where every value is finite: `weight`, and `kv_scale` where the
    cache is quantized."""
    leaves = jax.tree.leaves(policy, is_leaf=lambda x: isinstance(x, QTensor))
    finite = [is_finite(x) if isinstance(x, QTensor) else jnp.isfinite(x).all() for x in leaves]
    flags = {"weight": jnp.stack(finite).all()}
    if scales is not None:
        flags["kv_scale"] = jnp.isfinite(jnp.concatenate(jax.tree.leaves(scales))).all()
    return flags

"""The rollout's form of a policy: what a weight sync makes of the trainer's weights, and whether it is finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.lora import Adapters, unstack_adapters
from fp8rl_jax.models.policy import Layer, Policy, cast, unstack, with_layers
from fp8rl_jax.models.trained import check_uniform, quantized_tensors
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
    remedy: str = 'rollout.decode_layers = "scan" needs the same linears in every layer; use "unroll"',
) -> tuple[Policy, dict[str, Float[Array, ""]]]:
    """The rollout's form of `policy`: compute dtype, the recipe's linears quantized, layers unrolled or stacked.

    Args:
        policy: layers stacked, no adapters; weights that are quantized already stay as they are.
        remedy: what to do where the layers differ and are to stay stacked, for the message.

    Returns:
        The policy, and what quantization did to its weights (fp8/*_weight); no metrics where nothing is quantized.

    Raises:
        UserError: a pattern matches nothing, or the layers differ in what is quantized and are to stay stacked.
    """
    chosen = quantized_tensors(policy, recipe) if recipe.rollout.weight.quantized else {}
    fmt = recipe.rollout.weight
    served = cast(policy, dtype)
    sums: list[QuantizationSums] = []

    def replace(layer: Layer, master: Layer, names: list[str]) -> Layer:
        tensors, unrounded = layer.tensors(), master.tensors()
        for name in names:
            weight = unrounded[name].value
            if is_quantized(weight):
                continue
            quantized = quantize_weight(weight, fmt, backend)
            sums.append(weight_sums(weight, quantized))
            tensors[name] = type(tensors[name])(quantized, tensors[name].axes)
        return Layer(tensors)

    def metrics():
        return stack_sums(sums).metrics("weight") if sums else {}

    if not unroll:
        check_uniform(policy, chosen, remedy)
        return with_layers(served, replace(served.layers, policy.layers, list(chosen))), metrics()
    served, masters = unstack(served), unstack(policy)
    layers = []
    for i, (layer, master) in enumerate(zip(served.layers, masters.layers, strict=True)):
        layers.append(replace(layer, master, [name for name, where in chosen.items() if i in where]))
    return with_layers(served, nnx.List(layers)), metrics()


def served_adapters(adapters: Adapters, config: PolicyConfig, dtype: jnp.dtype, unroll: bool) -> Adapters | list[Adapters]:
    """The rollout's form of adapters: the compute dtype, laid out like the layers."""
    served = jax.tree.map(lambda x: rounded(x, dtype), adapters)
    return unstack_adapters(served, config) if unroll else served


def finite_flags(policy: Policy, scales: KVScales | None) -> dict[str, Bool[Array, ""]]:
    """One flag a tensor role, True where every value is finite: `weight`, and `kv_scale` where the cache is quantized."""
    leaves = jax.tree.leaves(policy, is_leaf=lambda x: isinstance(x, QTensor))
    finite = [is_finite(x) if isinstance(x, QTensor) else jnp.isfinite(x).all() for x in leaves]
    flags = {"weight": jnp.stack(finite).all()}
    if scales is not None:
        flags["kv_scale"] = jnp.isfinite(jnp.concatenate(jax.tree.leaves(scales))).all()
    return flags

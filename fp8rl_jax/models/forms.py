"""The two forms of a policy: what the trainer multiplies, and what the rollout multiplies.

Both are made of the same float32 masters, rounded to the compute dtype (or as they are, where the
recipe's weight_source says so), by the same quantizer, linear by linear as the recipe says. What
differs between the sides:

                     trainer_policy                      rollout_policy
    made             in every program that trains        once a weight sync
    quantized linear QuantizedWeight with its master,    QuantizedWeight without one: no
                     which receives the gradient         gradient
    formats          recipe.linear("trainer")            recipe.linear("rollout")
    KV cache         compute dtype                       query, key, value of recipe.rollout
    layers           stacked: scanned                    stacked, or a list: unrolled in decode
    the rest         the compute dtype; gradients flow   the compute dtype
                     through the cast

A linear that is of another kind in some layers only comes in runs (WeightRuns), cut out of the one
stack. What a form says of itself (its weights' types, `policy.compute`) is all that a forward pass
asks: it never sees the recipe.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.recipe import LinearPrecision, Recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.lora import Adapted, Adapters, UnstackedAdapters, unstack_adapters
from fp8rl_jax.models.policy import (
    Layer,
    Policy,
    Rounding,
    Weight,
    WeightRuns,
    cast,
    in_runs,
    linear_names,
    map_products,
    single_layers,
    to_compute,
    with_compute,
    with_layers,
    with_scales,
)
from fp8rl_jax.models.tensors import parameter_shapes, stack_of
from fp8rl_jax.parallel import devices_of
from fp8rl_jax.precision import (
    Compute,
    QTensor,
    QuantizationSums,
    QuantizedWeight,
    check_formats,
    exact_compute,
    format_of,
    is_finite,
    is_quantized,
    predequantize,
    quantize,
    quantized_layers,
    stack_sums,
    weight_sums,
)
from pallas_kernels.backend import Backend


def trainer_policy(
    policy: Policy,
    recipe: Recipe,
    dtype: jnp.dtype,
    backend: Backend = "auto",
    remat: bool = False,
    attention_chunk: int | None = None,
) -> Policy:
    """Make what the trainer's forward runs on.

    The weights are quantized here, once, whatever the number of forwards that share them. What is
    frozen has no gradient: linears that are quantized already (a base that rests in FP8), and all
    of a policy with adapters.

    Args:
        policy: float32 masters, layers stacked; adapters on a frozen base.
        recipe: its trainer formats.
        dtype: compute dtype of what is not quantized.
        backend: kernels.
        remat, attention_chunk: as in `precision.Compute`.

    Raises:
        UserError: a pattern of the recipe matches nothing.
    """
    made = exact_compute(backend) if recipe.exact else Compute
    compute = made(
        backend,
        probability=recipe.trainer.probability,
        remat=remat,
        attention_chunk=attention_chunk,
        joins=not recipe.exact and devices_of("mlp") > 1,
    )
    served = with_compute(cast(policy, dtype, recipe.weight_rounding), compute)
    kinds = linear_formats(policy.config, recipe, "trainer")
    if not kinds:
        return served
    tensors, masters = served.stack.tensors(), policy.stack.tensors()
    adapted = any(isinstance(weight, Adapted) for weight in masters.values())

    def quantized(kind: LinearPrecision, weight: Weight, master: Weight) -> Weight:
        trained = not adapted and not is_quantized(master.value)
        value = (master if recipe.weight_source == "master" else weight).value
        made = QuantizedWeight.of(value, master.value if trained else None, kind, backend)
        return Weight(made, weight.axes)

    def changed(
        weight: Weight | Adapted, master: Weight | Adapted, kinds: list[LinearPrecision | None]
    ) -> Weight | WeightRuns | Adapted:
        if isinstance(weight, Adapted) and isinstance(master, Adapted):
            return Adapted(in_runs(kinds, quantized, weight.base, master.base), weight.adapter)
        return in_runs(kinds, quantized, weight, master)

    linears = {name: changed(tensors[name], masters[name], kind) for name, kind in kinds.items()}
    return with_layers(served, Layer(tensors | linears))


def rollout_policy(
    policy: Policy, recipe: Recipe, dtype: jnp.dtype, unroll: bool, backend: Backend = "auto"
) -> tuple[Policy, dict[str, Float[Array, ""]]]:
    """Make what the rollout's forward runs on: what a weight sync does.

    Args:
        policy: float32 masters, layers stacked, no adapters; weights that are quantized already
            keep their values.
        recipe: its rollout formats.
        dtype: compute dtype of what is not quantized.
        unroll: a list of single layers; else they stay stacked.
        backend: kernels.

    Returns:
        The policy, and what quantization did to its weights (fp8/*_weight); no metrics where
        nothing is quantized.

    Raises:
        UserError: a pattern of the recipe matches nothing.
    """
    made, cache = exact_compute(backend) if recipe.exact else Compute, recipe.rollout
    served = with_compute(
        cast(policy, dtype, recipe.weight_rounding),
        made(backend, cache.query, cache.key, cache.value, cache.probability),
    )
    kinds = linear_formats(policy.config, recipe, "rollout")
    sums: list[QuantizationSums] = []

    sources = policy if recipe.weight_source == "master" else served

    def quantized(kind: LinearPrecision, weight: Weight, source: Weight) -> Weight:
        value = source.value
        if not is_quantized(value):
            value = quantize(source.value, kind.weight, backend)
            sums.append(weight_sums(source.value, value))
        return Weight(QuantizedWeight(value, precision=kind), weight.axes)

    def replaced(
        layer: Layer, source: Layer, kinds: dict[str, list[LinearPrecision | None]]
    ) -> Layer:
        tensors, others = layer.tensors(), source.tensors()
        return Layer(
            tensors | {n: in_runs(k, quantized, tensors[n], others[n]) for n, k in kinds.items()}
        )

    if unroll:
        stacks = {name: stack_of(policy.config, name) for name in kinds}
        unrolled = []
        pairs = zip(single_layers(served), single_layers(sources), strict=True)
        for i, pair in enumerate(pairs):
            here = {n: [kinds[n][s.index(i)]] for n, s in stacks.items() if i in s}
            unrolled.append(replaced(*pair, here))
        layers = nnx.List(unrolled)
    else:
        layers = replaced(served.stack, sources.stack, kinds)
    return with_layers(served, layers), stack_sums(sums).metrics("weight") if sums else {}


def rollout_adapters(
    adapters: Adapters,
    config: PolicyConfig,
    dtype: jnp.dtype,
    unroll: bool,
    rounding: Rounding = "nearest",
) -> Adapters | UnstackedAdapters:
    """Make the rollout's form of what is trained beside a base: the compute dtype, laid out like
    the layers."""
    served = jax.tree.map(lambda x: to_compute(x, dtype, rounding), adapters)
    return unstack_adapters(served, config) if unroll else served


def quantized_base(
    policy: Policy, recipe: Recipe, dtype: jnp.dtype, backend: Backend = "auto"
) -> Policy:
    """Make a frozen base of adapters that rests in the rollout's formats.

    Its quantized linears are bare QTensors, which both forms above take as they are.

    Args:
        policy: float32 masters, layers stacked.
    """
    served, _ = rollout_policy(policy, recipe, dtype, False, backend)
    bare = jax.tree.map(
        lambda x: x.quantized if isinstance(x, QuantizedWeight) else x, served, is_leaf=is_quantized
    )
    return with_compute(bare, policy.compute)


def predequantized(policy: Policy) -> Policy:
    """Move what does not depend on the input out of a decode loop (precision.predequantize).

    The identity where kernels multiply FP8 weights as they are. In exact mode, and for the CPU
    kernels, every weight of a product, the head's among them, takes the form of its products.

    Args:
        policy: in the rollout's form.
    """
    convert = partial(predequantize, compute=policy.compute)
    if policy.compute.exact or policy.compute.packs:
        return map_products(convert, policy)
    return jax.tree.map(
        lambda x: convert(x) if is_quantized(x) else x, policy, is_leaf=is_quantized
    )


def linear_formats(
    config: PolicyConfig, recipe: Recipe, side: Literal["rollout", "trainer"]
) -> dict[str, list[LinearPrecision | None]]:
    """Find the formats of each linear that one side quantizes, an entry for each of its stack.

    Returns:
        {"q_proj": [None, precision, precision], ...}; None where an entry is in the compute dtype.

    Raises:
        UserError: a pattern of the recipe matches nothing, or formats that two of its patterns
            give one linear cannot be computed.
    """
    if not recipe.quantizes(side):
        return {}
    found: dict[str, dict[int, LinearPrecision]] = {}
    shapes = parameter_shapes(config)
    for linear in quantized_layers(recipe, linear_names(config)):
        own = recipe.of_linear(linear)
        if own not in recipe.variants:
            check_formats(own)
        if (kind := own.linear(side)).weight.quantized:
            _, i, name = linear.split(".", 2)
            _check_rows(recipe, linear, kind, shapes[f"layers.{name}.weight"][-2:])
            found.setdefault(name, {})[int(i)] = kind
    return {
        name: [kinds.get(layer) for layer in stack_of(config, name)]
        for name, kinds in found.items()
    }


def _check_rows(recipe: Recipe, linear: str, kind: LinearPrecision, shape: tuple[int, ...]) -> None:
    """Refuse a linear whose rows, or columns where its gradients are quantized, cannot be packed.

    Raises:
        UserError: naming it.
    """
    outputs, inputs = shape
    sizes = {"weight": inputs, "activation": inputs, "output_gradient": outputs}
    for role, size in sizes.items():
        fmt = getattr(kind, role)
        packed = format_of(fmt, (1, 1)).packed if fmt.quantized else 1
        if size % packed:
            raise UserError(
                f"recipe {recipe.name!r}: {linear}: {size} numbers of a row of its {role} cannot "
                f"be stored {packed} to a byte in {fmt.name}; leave it out with excluded, or take "
                "a format of 8 bits"
            )


def finite_flags(policy: Policy) -> dict[str, Bool[Array, ""]]:
    """Flag the roles whose values are all finite: `weight`, and `kv_scale` of an FP8 cache."""
    scales, weights = policy.kv_scales, with_scales(policy, None)
    leaves: list[Any] = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, QTensor))
    finite = [is_finite(x) if isinstance(x, QTensor) else jnp.isfinite(x).all() for x in leaves]
    flags = {"weight": jnp.stack(finite).all()}
    if scales is not None:
        flags["kv_scale"] = jnp.isfinite(
            jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(scales)])
        ).all()
    return flags

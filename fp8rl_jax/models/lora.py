"""Low-rank adapters (LoRA, arXiv 2106.09685): a policy in two parts, the base that is frozen and
the adapters that are trained.

An adapted linear is one more type of weight: its container holds the base's and the adapter's, and
its `value` is an `AdaptedWeight`, so that forward, sharding and sync go on as they are. What a
trainer differentiates, and keeps moments of, is `split(policy)[0]`; without adapters that is the
policy itself, so trainers ask nothing else.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import (
    Layer,
    Policy,
    Weight,
    WeightRuns,
    linear_names,
    tensor_specs,
    with_layers,
)
from fp8rl_jax.models.tensors import stack_of
from fp8rl_jax.precision import AdaptedWeight, QTensor, dequantize


class Adapter(nnx.Module):
    """a [..., rank, in] and b [..., out, rank] of one linear, on the leading axes of its weight;
    their product is scaled."""

    def __init__(self, a: Weight, b: Weight, scale: float):
        self.a, self.b, self.scale = a, b, scale


class Adapted(nnx.Module):
    """A linear's weight with an adapter; stands where the layer had the weight."""

    def __init__(self, base: Weight, adapter: Adapter):
        self.base, self.adapter = base, adapter

    @property
    def value(self) -> AdaptedWeight:
        """What `precision.linear` multiplies."""
        return AdaptedWeight(
            self.base.value, self.adapter.a.value, self.adapter.b.value, self.adapter.scale
        )


Adapters = dict[str, Adapter]
"""By tensor name ("q_proj", "experts.up_proj"), layers stacked."""
Trained = Policy | Adapters


def adapted_tensors(config: PolicyConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Name the stacked tensors that get an adapter ("q_proj", ...), in the order of `tensor_specs`.

    Raises:
        UserError: a target that matches no linear, names something that is none, or picks some
            layers of a linear only; a rank above a side of a matrix.
    """
    linears = linear_names(config)
    others = (
        "embed_tokens",
        "lm_head",
        "norm",
        *(f"layers.{i}.router" for i in config.sparse_layers),
    )
    for pattern in lora.targets:
        if any(fnmatchcase(name, pattern) for name in linears):
            continue
        if other := next((name for name in others if fnmatchcase(name, pattern)), None):
            raise UserError(
                f"lora.targets: {pattern!r} names {other}, and only the linears of a layer can "
                "have an adapter"
            )
        raise UserError(
            f"lora.targets: {pattern!r} matches no linear of the model (names look like "
            f"{linears[0]!r})"
        )
    chosen: dict[str, set[int]] = {}
    for linear in linears:
        if any(fnmatchcase(linear, pattern) for pattern in lora.targets):
            _, layer, name = linear.split(".", 2)
            chosen.setdefault(name, set()).add(int(layer))
    for name, layers in chosen.items():
        if missing := sorted(set(stack_of(config, name)) - layers):
            raise UserError(
                f"lora.targets: {name} is chosen in {len(layers)} layers and not in layer "
                f"{missing[0]}; "
                f"choose it in all layers that have it"
            )
        *_, out, inner = tensor_specs(config)[f"layers.{name}"][0]
        if lora.rank > min(out, inner):
            raise UserError(
                f"lora.rank = {lora.rank} is above a side of {name} [{out}, {inner}]; lower it"
            )
    return tuple(
        name for spec in tensor_specs(config) if (name := spec.removeprefix("layers.")) in chosen
    )


def build_adapters(config: PolicyConfig, lora: LoraConfig, factors) -> Adapters:
    """Build adapters of what `factors(name, shape of a, shape of b)` gives for each tensor."""
    adapters = {}
    for name in adapted_tensors(config, lora):
        (*stack, out, inner), (*leading, rows, columns) = tensor_specs(config)[f"layers.{name}"]
        a, b = factors(name, (*stack, lora.rank, inner), (*stack, out, lora.rank))
        adapters[name] = Adapter(
            Weight(a, (*leading, "rank", columns)), Weight(b, (*leading, rows, "rank")), lora.scale
        )
    return adapters


def init_adapters(config: PolicyConfig, lora: LoraConfig, key: Key[Array, ""]) -> Adapters:
    """Draw float32 adapters that change nothing yet: b is zero.

    a is uniform in +-1/sqrt(in), PEFT's kaiming_uniform_ with a = sqrt(5).

    Raises:
        UserError: as `adapted_tensors`.
    """
    names = list(tensor_specs(config))

    def factors(name, a_shape, b_shape):
        bound = a_shape[-1] ** -0.5
        own = jax.random.fold_in(key, names.index(f"layers.{name}"))
        return jax.random.uniform(own, a_shape, jnp.float32, -bound, bound), jnp.zeros(
            b_shape, jnp.float32
        )

    return build_adapters(config, lora, factors)


def has_adapters(policy: Policy) -> bool:
    """Tell whether any linear has an adapter; layers stacked or unrolled."""
    layers = [policy.layers] if isinstance(policy.layers, Layer) else policy.layers
    return any(
        isinstance(weight, Adapted) for layer in layers for weight in layer.tensors().values()
    )


def split(policy: Policy) -> tuple[Trained, Policy | None]:
    """Split a policy into what is trained and what is frozen; nothing is copied.

    They are (adapters, base), or (policy, None) where it has no adapters.

    Args:
        policy: layers stacked.
    """
    tensors = policy.stack.tensors()
    adapters = {
        name: weight.adapter for name, weight in tensors.items() if isinstance(weight, Adapted)
    }
    if not adapters:
        return policy, None
    return adapters, with_layers(
        policy, Layer({name: getattr(weight, "base", weight) for name, weight in tensors.items()})
    )


def join(trained: Trained | list[Adapters], frozen: Policy | None) -> Policy:
    """Join what `split` returned.

    For a base whose layers are unrolled, the adapters are a list of each layer's.
    """
    if frozen is None:
        assert isinstance(trained, Policy)
        return trained

    def attach(layer: Layer, adapters: Adapters) -> Layer:
        tensors = layer.tensors()
        return Layer(
            tensors | {name: Adapted(tensors[name], adapter) for name, adapter in adapters.items()}
        )

    if isinstance(frozen.layers, Layer):
        assert isinstance(trained, dict)
        return with_layers(frozen, attach(frozen.layers, trained))
    assert isinstance(trained, list)
    layers = [attach(*pair) for pair in zip(frozen.layers, trained, strict=True)]
    return with_layers(frozen, nnx.List(layers))


def unstack_adapters(adapters: Adapters, config: PolicyConfig) -> list[Adapters]:
    """List the adapters of each layer, as `join` takes them for an unrolled base."""
    layers: list[Adapters] = [{} for _ in range(config.num_layers)]
    for name, adapter in adapters.items():
        for place, layer in enumerate(stack_of(config, name)):
            layers[layer][name] = jax.tree.map(lambda x, place=place: x[place], adapter)
    return layers


def merge(policy: Policy) -> Policy:
    """Add adapters to their base: plain weights in host memory.

    base + scale * b a is computed in float64 and rounded to float32.

    An FP8 base is what the adapters were trained on, so it is that base, dequantized, that they are
    added to. A policy without adapters and quantized weights comes back as it is.

    Args:
        policy: layers stacked, every shard addressable by this process.
    """

    def unpacked(base: Weight | WeightRuns) -> np.ndarray:
        if isinstance(base, WeightRuns):
            return np.concatenate([unpacked(part) for part in base.parts])
        quantized = isinstance(base.value, QTensor)
        return np.asarray(
            dequantize(jax.tree.map(jnp.asarray, base.value)) if quantized else base.value
        )

    def plain(name: str, weight: Weight | WeightRuns | Adapted) -> Weight:
        value = unpacked(weight.base if isinstance(weight, Adapted) else weight)
        if isinstance(weight, Adapted):
            value = _add(
                value,
                np.asarray(weight.adapter.a.value),
                np.asarray(weight.adapter.b.value),
                weight.adapter.scale,
            )
        return Weight(value, tensor_specs(policy.config)[f"layers.{name}"][1])

    tensors = policy.stack.tensors()
    changed = {
        name: plain(name, weight)
        for name, weight in tensors.items()
        if isinstance(weight, Adapted | WeightRuns) or isinstance(weight.value, QTensor)
    }
    return with_layers(policy, Layer(tensors | changed)) if changed else policy


def _add(base: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    out = np.empty(base.shape, np.float32)
    # a matrix at a time: in float64 all would be twice the float32 model
    for i in np.ndindex(base.shape[:-2]):
        out[i] = base[i].astype(np.float64) + scale * (
            b[i].astype(np.float64) @ a[i].astype(np.float64)
        )
    return out

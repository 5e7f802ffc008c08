"""Low-rank adapters (LoRA, arXiv 2106.09685): a policy in two parts, the base that is frozen and
the adapters that are trained, with norms that are trained in full beside them.

An adapted linear is one more type of weight: its container holds the base's and the adapter's, and
its `value` is an `AdaptedWeight`, so that forward, sharding and sync go on as they are. A norm that
is trained is a `TrainedWeight`, which the base then has not. What a trainer differentiates, and
keeps moments of, is `split(policy)[0]`; without adapters that is the policy itself, so trainers ask
nothing else.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Key

from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import (
    Layer,
    Policy,
    Weight,
    WeightRuns,
    changed_policy,
    entry_of,
    linear_names,
    tensor_specs,
)
from fp8rl_jax.models.tensors import of_kind, stack_of
from fp8rl_jax.parallel import shard_policy, take_entry, to_host
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


class TrainedWeight(Weight):
    """A weight that is trained in full beside the adapters; stands where the policy had it."""


Adapters = dict[str, Adapter | TrainedWeight]
"""What is trained beside a frozen base, by tensor name, layers stacked: adapters of linears
("q_proj", "experts.up_proj"), and norms ("input_layernorm", and "norm", the one behind the last
layer, which has no layers)."""
Trained = Policy | Adapters
UnstackedAdapters = dict[str, Any]
"""Beside a base whose layers are unrolled: a list of the layers that have the tensor; of the last
norm itself."""
FINAL_NORM = "norm"


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


def trained_norms(config: PolicyConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Name the norms that are trained in full ("input_layernorm", "norm"), in the order of
    `tensor_specs`.

    Raises:
        UserError: a pattern that matches no norm of the model.
    """
    names = [name.removeprefix("layers.") for name in tensor_specs(config)]
    norms = [name for name in names if name in (*of_kind("norm"), FINAL_NORM)]
    for pattern in lora.norms:
        if not any(fnmatchcase(name, pattern) for name in norms):
            raise UserError(
                f"lora.norms: {pattern!r} matches no norm of the model, which has "
                f"{', '.join(norms)}"
            )
    return tuple(
        name for name in norms if any(fnmatchcase(name, pattern) for pattern in lora.norms)
    )


def build_adapters(config: PolicyConfig, lora: LoraConfig, factors) -> Adapters:
    """Build adapters of what `factors(name, shape of a, shape of b)` gives for each tensor."""
    adapters: Adapters = {}
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


def build_norms(config: PolicyConfig, lora: LoraConfig, value) -> Adapters:
    """Build the norms that are trained in full of what `value(name, shape)` gives for each.

    Raises:
        UserError: as `trained_norms`.
    """
    specs = tensor_specs(config)
    norms: Adapters = {}
    for name in trained_norms(config, lora):
        shape, axes = specs[name if name == FINAL_NORM else f"layers.{name}"]
        norms[name] = TrainedWeight(value(name, shape), axes)
    return norms


def norms_of(policy: Policy, lora: LoraConfig) -> Adapters:
    """Take the norms that are trained in full out of a policy; nothing is copied.

    Args:
        policy: layers stacked.

    Raises:
        UserError: as `trained_norms`.
    """
    tensors = policy.stack.tensors() | {FINAL_NORM: policy.norm}
    return build_norms(policy.config, lora, lambda name, shape: tensors[name].value)


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
    adapters: Adapters = {
        name: getattr(weight, "adapter", weight)
        for name, weight in tensors.items()
        if isinstance(weight, Adapted | TrainedWeight)
    }
    if not adapters:
        return policy, None
    frozen = {
        name: getattr(weight, "base", weight)
        for name, weight in tensors.items()
        if not isinstance(weight, TrainedWeight)
    }
    norm: Weight | None = policy.norm
    if isinstance(norm, TrainedWeight):
        adapters[FINAL_NORM], norm = norm, None
    return adapters, changed_policy(policy, layers=Layer(frozen), norm=norm)


def join(trained: Trained | UnstackedAdapters, frozen: Policy | None) -> Policy:
    """Join what `split` returned.

    Args:
        trained: where the layers of `frozen` are unrolled, as `unstack_adapters` gives it.
        frozen: with a norm that is trained, too, or without it.
    """
    if frozen is None:
        assert isinstance(trained, Policy)
        return trained
    assert isinstance(trained, dict)
    own: UnstackedAdapters = dict(trained)
    norm = own.pop(FINAL_NORM, frozen.norm)

    def attach(layer: Layer, adapters: Adapters) -> Layer:
        tensors = layer.tensors()
        return Layer(
            tensors
            | {
                name: part if isinstance(part, TrainedWeight) else Adapted(tensors[name], part)
                for name, part in adapters.items()
            }
        )

    if isinstance(frozen.layers, Layer):
        return changed_policy(frozen, layers=attach(frozen.layers, own), norm=norm)
    parts: list[Adapters] = [{} for _ in frozen.layers]
    for name, stack in own.items():
        for layer, part in zip(stack_of(frozen.config, name), stack, strict=True):
            parts[layer][name] = part
    layers = [attach(*pair) for pair in zip(frozen.layers, parts, strict=True)]
    return changed_policy(frozen, layers=nnx.List(layers), norm=norm)


def unstack_adapters(adapters: Adapters, config: PolicyConfig) -> UnstackedAdapters:
    """Cut stacks into those of single layers, as `join` takes them for an unrolled base."""

    def single(name: str, stack: Adapter | TrainedWeight) -> Any:
        if name == FINAL_NORM:
            return stack
        count = len(stack_of(config, name))
        return [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count)]

    return {name: single(name, stack) for name, stack in adapters.items()}


def merge(policy: Policy, mesh: Mesh | None = None) -> Policy:
    """Add adapters to their base: plain weights.

    base + scale * b a is computed in float64 and rounded to float32, on the host, layer by layer.

    An FP8 base is what the adapters were trained on, so it is that base, dequantized, that they are
    added to. A norm that was trained takes its place. A policy without adapters and quantized
    weights comes back as it is.

    Args:
        policy: layers stacked. Where processes share it, all of them call this together.
        mesh: where each stack goes before the next one is made; default: they stay on the host.
    """

    def plain(name: str, weight: Weight | WeightRuns | Adapted) -> Weight:
        if isinstance(weight, TrainedWeight):
            return Weight(weight.value, weight.axes)
        shape, axes = tensor_specs(policy.config)[f"layers.{name}"]
        stack = np.empty(shape, np.float32)
        for i in range(shape[0]):
            entry = to_host(entry_of(weight, i, take_entry))
            if isinstance(entry, Adapted):
                stack[i] = added(unpacked(entry.base), entry.adapter)
            else:
                stack[i] = unpacked(entry)
        made = Weight(stack, axes)
        return made if mesh is None else shard_policy(made, mesh)

    tensors = policy.stack.tensors()
    changed = {
        name: plain(name, weight)
        for name, weight in tensors.items()
        if isinstance(weight, Adapted | TrainedWeight | WeightRuns)
        or isinstance(weight.value, QTensor)
    }
    norm = policy.norm
    if isinstance(norm, TrainedWeight):
        norm = Weight(norm.value, norm.axes)
    elif not changed:
        return policy
    return changed_policy(policy, layers=Layer(tensors | changed), norm=norm)


def unpacked(weight: Weight) -> np.ndarray:
    """Give a weight of host arrays as one array, dequantized where it is quantized."""
    quantized = isinstance(weight.value, QTensor)
    return np.asarray(
        dequantize(jax.tree.map(jnp.asarray, weight.value)) if quantized else weight.value
    )


def added(base: np.ndarray, adapter: Adapter) -> np.ndarray:
    """Add an adapter to a base [..., out, in] in host memory, as `merge` does."""
    a, b = unpacked(adapter.a), unpacked(adapter.b)
    out = np.empty(base.shape, np.float32)
    # a matrix at a time: in float64 all would be twice the float32 model
    for i in np.ndindex(base.shape[:-2]):
        out[i] = base[i].astype(np.float64) + adapter.scale * (
            b[i].astype(np.float64) @ a[i].astype(np.float64)
        )
    return out

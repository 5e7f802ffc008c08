"""The policy: Flax NNX containers for the weights of a decoder-only transformer, in Hugging Face's
[out, in] layout.

The modules hold parameters and say what each axis means; the arithmetic is in `forward`. A policy
is a pytree, so `jax.jit`, `jax.grad`, optax and orbax take it as it is. Its layers come in two
forms with the same leaves: stacked on a leading axis (what the trainer scans) and a list of single
layers (what decode unrolls).

Where only some layers have experts, each tensor is stacked over the layers that have it; where a
recipe quantizes a linear in some layers only, its stack comes in runs, each a weight of its own
(`WeightRuns`). `equal_runs` says which layers have tensors of one kind, which is what can be
scanned, and `run_of_layers` cuts them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import TENSORS, of_kind, parameter_shapes, stack_of
from fp8rl_jax.precision import Compute, Stored, is_quantized
from fp8rl_jax.precision.rounding import round_by_hash
from pallas_kernels.rounding import rounded

LINEARS, EXPERT_LINEARS = of_kind("linear"), of_kind("experts")
_ROUTER = of_kind("router")


_GROUPS = tuple({name.rpartition(".")[0]: None for name in TENSORS if "." in name})


class Weight(nnx.Module):
    """One tensor, `weight`; `axes` are the logical names of its axes, which parallel.rules maps to
    the mesh."""

    def __init__(self, value: Stored | np.ndarray, axes: tuple[str, ...]):
        self.weight = nnx.Param(value)
        self.axes = axes

    @property
    def value(self) -> Any:
        """What it holds: an array, or a type of precision.linear."""
        return self.weight.get_value()


class Tensor(Protocol):
    """What a layer holds of one tensor: a `Weight`, or one with an adapter (models.lora)."""

    @property
    def value(self) -> Any: ...


class WeightRuns(nnx.Module):
    """One tensor that is of another kind in some layers, quantized or not: runs of its stack, one
    after the other.

    Attributes:
        parts: weights, each stacked over the layers of its run.
        sizes: layers of each run.
    """

    def __init__(self, parts: Sequence[Weight], sizes: Sequence[int]):
        self.parts, self.sizes = nnx.List(parts), tuple(sizes)


class FeedForward(nnx.Module):
    """The weights of a layer's experts, each [experts, out, in], or of those that every token uses,
    [out, in]; or of all layers that have some."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, tensors: Mapping[str, Any]):
        for name, weight in tensors.items():
            setattr(self, name, weight)


class Layer(nnx.Module):
    """The tensors of one transformer layer, or of all of them when each has a leading layer axis;
    None where it has none.

    Args:
        tensors: by name, as models/tensors.py has them: "q_proj", "experts.up_proj".
    """

    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    router: Tensor
    router_bias: Tensor | None
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    pre_feedforward_layernorm: Tensor | None
    post_feedforward_layernorm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_a_proj: Tensor | None
    q_a_layernorm: Tensor | None
    q_b_proj: Tensor
    kv_a_proj_with_mqa: Tensor
    kv_a_layernorm: Tensor
    kv_b_proj: Tensor
    experts: FeedForward | None
    shared_experts: FeedForward | None

    def __init__(self, tensors: Mapping[str, Tensor | WeightRuns]):
        for name in TENSORS:
            if "." not in name:
                setattr(self, name, tensors.get(name))
        for group in _GROUPS:
            parts = {
                n.removeprefix(f"{group}."): w
                for n, w in tensors.items()
                if n.startswith(f"{group}.")
            }
            setattr(self, group, FeedForward(parts) if parts else None)

    @property
    def norms(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """RMSNorms before and after attention, before and after the feed-forward layer, or None.

        Hugging Face has the name post_attention_layernorm for the second of four norms, and for the
        second of two.
        """
        if self.pre_feedforward_layernorm is None:
            return self.input_layernorm, None, self.post_attention_layernorm, None
        before_mlp, after_mlp = self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        return self.input_layernorm, self.post_attention_layernorm, before_mlp, after_mlp

    def tensors(self) -> dict[str, Any]:
        """List what the constructor was given."""
        found = {}
        for name in TENSORS:
            group, _, own = name.rpartition(".")
            holder = getattr(self, group) if group else self
            if holder is not None and (weight := getattr(holder, own)) is not None:
                found[name] = weight
        return found


class Policy(nnx.Module):
    """Weights and shape of a policy.

    Attributes:
        config: PolicyConfig.
        embed_tokens: [vocab, hidden]; also the output head when `lm_head` is None (tied
            embeddings).
        layers: `Layer` whose tensors are stacked [layers, ...], or an nnx.List of single layers.
            `stack` is the former, and says so of a list.
        norm: [hidden].
        lm_head: [vocab, hidden] or None.
        compute: how it is computed with; `models.forms` sets it with a recipe's.
        scales: a Variable with the scales of its FP8 cache, `kv_scales`; None where there is none,
            or they are not known yet.
    """

    def __init__(
        self,
        config: PolicyConfig,
        embed_tokens: Weight,
        layers: Layer | nnx.List[Layer],
        norm: Weight,
        lm_head: Weight | None,
        compute: Compute | None = None,
        kv_scales: KVScales | None = None,
    ):
        self.config = config
        self.compute = compute or Compute()
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.scales = None if kv_scales is None else nnx.Variable(kv_scales)

    @property
    def kv_scales(self) -> KVScales | None:
        """What `scales` holds."""
        return None if self.scales is None else self.scales.get_value()

    @property
    def head(self) -> Array:
        """Output embedding [vocab, hidden]."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).value

    @property
    def stacked(self) -> bool:
        """Whether the layers are stacks, and not a list."""
        return isinstance(self.layers, Layer)

    @property
    def stack(self) -> Layer:
        """The layers of a policy that is stacked."""
        assert isinstance(self.layers, Layer)
        return self.layers


_AXES = {"embed_tokens": ("vocab", "embed"), "lm_head": ("vocab", "embed"), "norm": ("norm",)}


def tensor_specs(config: PolicyConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """List shape and logical axes of every tensor, layers stacked.

    {"layers.q_proj": ((L, out, in), ("layers", "heads", "embed"))}.
    """
    specs = {}
    for path, shape in parameter_shapes(config).items():
        name = path.removesuffix(".weight")
        if name.startswith("layers."):
            specs[name] = shape, ("layers", *TENSORS[name.removeprefix("layers.")].axes)
        else:
            specs[name] = shape, _AXES[name]
    return specs


def build_policy(
    config: PolicyConfig, tensor: Callable[[str, tuple[int, ...], tuple[str, ...]], Stored]
) -> Policy:
    """Build a policy of what `tensor(name, shape, logical_axes)` gives for each tensor."""
    made = {
        name: Weight(tensor(name, shape, axes), axes)
        for name, (shape, axes) in tensor_specs(config).items()
    }
    layers = Layer(
        {name.removeprefix("layers."): w for name, w in made.items() if name.startswith("layers.")}
    )
    return Policy(config, made["embed_tokens"], layers, made["norm"], made.get("lm_head"))


@partial(jax.jit, static_argnames=("config", "dtype"))
def init_policy(
    config: PolicyConfig, key: Key[Array, ""], dtype: jnp.dtype = jnp.float32
) -> Policy:
    """Draw random weights by the GPT-2 rule.

    Normal with deviation 0.02, projections into the residual stream over sqrt(2 layers).

    Norms multiply by 1, biases are 0.
    """
    names = list(tensor_specs(config))

    def tensor(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Array:
        row = TENSORS.get(name.removeprefix("layers."))
        if len(axes) == (1 if row is None else 2):
            one = 1 - config.family.norm_offset
            return jnp.full(shape, one if axes[-1] == "norm" else 0.0, dtype)
        into_residual = row is not None and row.into_residual
        deviation = 0.02 / (2 * config.num_layers) ** 0.5 if into_residual else 0.02
        return (
            deviation * jax.random.normal(jax.random.fold_in(key, names.index(name)), shape)
        ).astype(dtype)

    return build_policy(config, tensor)


def linear_names(config: PolicyConfig) -> tuple[str, ...]:
    """List every linear that a recipe may quantize, in model order.

    layers.0.q_proj, ..., layers.0.experts.gate_proj, ...

    The experts of a layer are one linear. Embeddings, output head, norms and the router are not
    among them.
    """
    pairs = ((i, name) for i in range(config.num_layers) for name in (*LINEARS, *EXPERT_LINEARS))
    return tuple(f"layers.{i}.{name}" for i, name in pairs if i in stack_of(config, name))


def parameter_count(config: PolicyConfig) -> int:
    """Count the parameters, tied embeddings once."""
    return sum(math.prod(shape) for shape, _ in tensor_specs(config).values())


def matrix_parameters(config: PolicyConfig) -> int:
    """Count the parameters of the matrices that a token passes through, of experts those it uses.

    Embedding and head are not among them.
    """
    total = 0
    for name, (shape, _) in tensor_specs(config).items():
        tensor = name.removeprefix("layers.")
        if tensor in (*LINEARS, "router"):
            total += math.prod(shape)
        elif config.experts is not None and tensor in EXPERT_LINEARS:
            total += math.prod(shape) // config.experts.count * config.experts.per_token
    return total


Rounding = Literal["nearest", "stochastic"]
"""To the compute dtype: to nearest even, or up and down by a hash of each value."""


def to_compute(x: Array, dtype: jnp.dtype, rounding: Rounding) -> Array:
    """Round one tensor to the compute dtype; gradients flow through."""
    if rounding == "stochastic" and x.dtype == jnp.float32:
        return round_by_hash(x, dtype)
    return rounded(x, dtype)


def cast(policy: Policy, dtype: jnp.dtype, rounding: Rounding = "nearest") -> Policy:
    """Cast plain tensors to `dtype`; quantized ones and the router stay as they are.

    Gradients flow through the cast.

    A router rounded to bfloat16 moves its scores by 2^-9 of themselves, enough to swap experts that
    score alike.
    """

    def convert(path, x):
        router = any(getattr(key, "key", getattr(key, "name", None)) in _ROUTER for key in path)
        return x if router or is_quantized(x) else to_compute(x, dtype, rounding)

    return jax.tree_util.tree_map_with_path(convert, policy, is_leaf=is_quantized)


def map_products(change: Callable, policy: Policy) -> Policy:
    """Replace every weight that a product takes, the head's last, by change(value).

    The embedding stays as it is.
    """

    def changed(layer: Layer) -> Layer:
        tensors = layer.tensors()
        for name in (*LINEARS, *EXPERT_LINEARS):
            if name in tensors:
                # one with an adapter has no axes of its own
                tensors[name] = _map_runs(
                    lambda weight: Weight(change(weight.value), getattr(weight, "axes", ())),
                    tensors[name],
                )
        return Layer(tensors)

    layers = (
        changed(policy.layers)
        if isinstance(policy.layers, Layer)
        else nnx.List([changed(layer) for layer in policy.layers])
    )
    head = Weight(change(policy.head), _AXES["lm_head"])
    return changed_policy(policy, layers=layers, lm_head=head)


def in_runs(kinds: Sequence[Any], change: Callable, weight: Any, *others: Any) -> Any:
    """Change a tensor's stack in runs of layers that are of one kind.

    Args:
        kinds: of each entry of the stack; None: the entry stays as it is.
        change: called as change(kind, weight, *others) with the stacks of a run of layers, cut out
            of all that are given; gives a weight.
        weight: a Weight; WeightRuns where it was made by the same kinds.

    Returns:
        A Weight where all layers are alike, else WeightRuns.
    """
    runs = [(kind, len(list(group))) for kind, group in groupby(kinds)]

    def changed(kind: Any, *parts: Any) -> Any:
        return parts[0] if kind is None else change(kind, *parts)

    if len(runs) == 1:
        return changed(kinds[0], weight, *others)
    sizes = tuple(size for _, size in runs)
    split = zip(*(_split(x, sizes) for x in (weight, *others)), strict=True)
    parts = [changed(kind, *part) for (kind, _), part in zip(runs, split, strict=True)]
    return WeightRuns(parts, sizes)


def _map_runs(change: Callable, weight: Any) -> Any:
    """change(weight), of each run where it comes in runs or holds a tensor that does."""
    if not (found := _runs_in(weight)):
        return change(weight)
    return WeightRuns([change(part) for part in _split(weight, found[0].sizes)], found[0].sizes)


def _is_runs(x: Any) -> bool:
    return isinstance(x, WeightRuns)


def _runs_in(weight: Any) -> list[WeightRuns]:
    return [x for x in jax.tree.leaves(weight, is_leaf=_is_runs) if _is_runs(x)]


def _split(weight: Any, sizes: tuple[int, ...]) -> list[Any]:
    """A weight, or a container of some, as one for each run of its stack."""
    leaves, structure = jax.tree.flatten(weight, is_leaf=_is_runs)
    if others := [x.sizes for x in leaves if _is_runs(x) and x.sizes != sizes]:
        raise ValueError(
            f"runs of {sizes} layers, and of {others[0]} in a weight that has them already"
        )
    cuts = list(accumulate(sizes))[:-1]
    parts = [x.parts if _is_runs(x) else jnp.split(x, cuts) for x in leaves]
    return [jax.tree.unflatten(structure, part) for part in zip(*parts, strict=True)]


def equal_runs(policy: Policy) -> list[range]:
    """Split the layers of a stacked policy into the longest runs whose tensors are of one kind."""

    def kind(layer: int) -> list[tuple[str, int]]:
        """The tensors that it has, and in which run of its stack each is."""
        found = []
        for name, weight in policy.stack.tensors().items():
            if layer in (stack := stack_of(policy.config, name)):
                runs = _runs_in(weight)
                found.append((name, _part_of(runs[0], stack.index(layer))[0] if runs else 0))
        return found

    runs = (list(group) for _, group in groupby(range(policy.config.num_layers), kind))
    return [range(run[0], run[-1] + 1) for run in runs]


def _part_of(runs: WeightRuns, place: int) -> tuple[int, int]:
    """(the run that holds entry `place` of the stack, the entry's place in it)."""
    for number, size in enumerate(runs.sizes):
        if place < size:
            return number, place
        place -= size
    raise IndexError(f"a stack of {sum(runs.sizes)} layers has no entry behind its last")


def run_of_layers(policy: Policy, start: int, stop: int) -> Layer:
    """Cut out layers start ... stop - 1 of a stacked policy, as stacks of their own.

    They lie in one of its `equal_runs`.
    """
    return _cut(
        policy,
        start,
        lambda x, first: x if len(x) == stop - start else x[first : first + stop - start],
    )


def unstack(policy: Policy) -> Policy:
    """Turn the stacked layers of a policy into a list, each a slice of the tensors."""
    return with_layers(policy, nnx.List(single_layers(policy)))


def single_layers(policy: Policy) -> list[Layer]:
    """Slice the layers of a stacked policy."""
    return [_cut(policy, i, lambda x, place: x[place]) for i in range(policy.config.num_layers)]


def with_layers(policy: Policy, layers: Layer | nnx.List[Layer]) -> Policy:
    """Put a policy around other layers."""
    return changed_policy(policy, layers=layers)


def with_compute(policy: Policy, compute: Compute) -> Policy:
    """Let a policy be computed with otherwise."""
    return changed_policy(policy, compute=compute)


def with_scales(policy: Policy, scales: KVScales | None) -> Policy:
    """Give a policy the scales of its FP8 cache."""
    return changed_policy(policy, kv_scales=scales)


def changed_policy(policy: Policy, **fields: Any) -> Policy:
    """Replace some of what the constructor was given."""
    names = ("config", "embed_tokens", "layers", "norm", "lm_head", "compute", "kv_scales")
    return Policy(**({name: getattr(policy, name) for name in names} | fields))


def _cut(policy: Policy, layer: int, take: Callable) -> Layer:
    """The tensors that layer `layer` has, each array as take(array, place of the layer in the
    tensor's stack)."""
    cut = {}
    for name, weight in policy.stack.tensors().items():
        layers = stack_of(policy.config, name)
        if layer in layers:
            cut[name] = entry_of(weight, layers.index(layer), take)
    return Layer(cut)


def entry_of(weight: Any, place: int, take: Callable) -> Any:
    """Cut an entry out of a tensor's stack, each array as take(array, place in it)."""

    def cut(x):
        if not _is_runs(x):
            return take(x, place)
        number, inner = _part_of(x, place)
        return entry_of(x.parts[number], inner, take)

    return jax.tree.map(cut, weight, is_leaf=_is_runs)

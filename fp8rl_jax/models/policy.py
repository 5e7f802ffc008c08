"""The policy: Flax NNX containers for the weights of a decoder-only transformer, in Hugging Face's [out, in] layout.

The modules hold parameters and say what each axis means; the arithmetic is in `forward`. A policy is a pytree, so
`jax.jit`, `jax.grad`, optax and orbax take it as it is. Its layers come in two forms with the same leaves: stacked on a
leading axis (what the trainer scans) and a list of single layers (what decode unrolls).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.hf_names import parameter_shapes
from fp8rl_jax.precision import is_quantized

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


class Weight(nnx.Module):
    """One tensor, `weight`; `axes` are the logical names of its axes, which parallel.rules maps to the mesh."""

    def __init__(self, value: Array, axes: tuple[str, ...]):
        self.weight = nnx.Param(value)
        self.axes = axes

    @property
    def value(self):
        """The array or QTensor itself."""
        return self.weight.get_value()


class Layer(nnx.Module):
    """The tensors of one transformer layer, or of all of them when each has a leading layer axis."""

    def __init__(self, tensors: dict[str, Weight | None]):
        for name in (*LINEARS, *NORMS):
            setattr(self, name, tensors.get(name))


class Policy(nnx.Module):
    """Weights and shape of a policy.

    Attributes:
        config: PolicyConfig.
        embed_tokens: [vocab, hidden]; also the output head when `lm_head` is None (tied embeddings).
        layers: `Layer` whose tensors are stacked [layers, ...], or an nnx.List of single layers.
        norm: [hidden].
        lm_head: [vocab, hidden] or None.
    """

    def __init__(self, config: PolicyConfig, embed_tokens: Weight, layers: Layer, norm: Weight, lm_head: Weight | None):
        self.config = config
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head

    @property
    def head(self) -> Array:
        """Output embedding [vocab, hidden]."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).value

    @property
    def stacked(self) -> bool:
        return isinstance(self.layers, Layer)


_AXES = {
    "embed_tokens": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "q_proj": ("heads", "embed"),
    "k_proj": ("kv_heads", "embed"),
    "v_proj": ("kv_heads", "embed"),
    "o_proj": ("embed", "heads"),
    "gate_proj": ("mlp", "embed"),
    "up_proj": ("mlp", "embed"),
    "down_proj": ("embed", "mlp"),
}


def tensor_specs(config: PolicyConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and logical axes of every tensor, layers stacked: {"layers.q_proj": ((L, out, in), ("layers", "heads", "embed"))}."""
    specs = {}
    for path, shape in parameter_shapes(config).items():
        name = path.removesuffix(".weight")
        axes = _AXES.get(name.removeprefix("layers."), ("norm",))
        specs[name] = (shape, ("layers", *axes) if name.startswith("layers.") else axes)
    return specs


def build_policy(config: PolicyConfig, tensor: Callable[[str, tuple[int, ...], tuple[str, ...]], Array]) -> Policy:
    """A policy whose tensors come from `tensor(name, shape, logical_axes)`, called once for each entry of `tensor_specs`."""
    made = {name: Weight(tensor(name, shape, axes), axes) for name, (shape, axes) in tensor_specs(config).items()}
    layers = Layer({name.removeprefix("layers."): w for name, w in made.items() if name.startswith("layers.")})
    return Policy(config, made["embed_tokens"], layers, made["norm"], made.get("lm_head"))


def init_policy(config: PolicyConfig, key: Key[Array, ""], dtype: jnp.dtype = jnp.float32) -> Policy:
    """Random weights by the GPT-2 rule: normal with deviation 0.02, projections into the residual stream over sqrt(2 layers).

    Norms are 1; compile it with `jax.jit(init_policy, static_argnums=0)` for large models.
    """
    names = list(tensor_specs(config))

    def tensor(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Array:
        if axes[-1] == "norm":
            return jnp.ones(shape, dtype)
        into_residual = name.endswith(("o_proj", "down_proj"))
        deviation = 0.02 / (2 * config.num_layers) ** 0.5 if into_residual else 0.02
        return (deviation * jax.random.normal(jax.random.fold_in(key, names.index(name)), shape)).astype(dtype)

    return build_policy(config, tensor)


def linear_names(config: PolicyConfig) -> tuple[str, ...]:
    """Every linear that a recipe may quantize, in model order: layers.0.q_proj, layers.0.k_proj, ..."""
    return tuple(f"layers.{i}.{name}" for i in range(config.num_layers) for name in LINEARS)


def parameter_count(config: PolicyConfig) -> int:
    """Number of parameters, tied embeddings counted once."""
    total = 0
    for shape, _ in tensor_specs(config).values():
        size = 1
        for side in shape:
            size *= side
        total += size
    return total


def cast(policy: Policy, dtype: jnp.dtype) -> Policy:
    """All plain tensors in `dtype`, quantized ones as they are; gradients flow through the cast."""
    return jax.tree.map(lambda x: x if is_quantized(x) else x.astype(dtype), policy, is_leaf=is_quantized)


def unstack(policy: Policy) -> Policy:
    """The same policy with `layers` as a list of single layers, each a slice of the stacked tensors."""
    return with_layers(
        policy, nnx.List([jax.tree.map(lambda x, i=i: x[i], policy.layers) for i in range(policy.config.num_layers)])
    )


def with_layers(policy: Policy, layers: Layer | nnx.List) -> Policy:
    """The same policy around other layers."""
    return Policy(policy.config, policy.embed_tokens, layers, policy.norm, policy.lm_head)

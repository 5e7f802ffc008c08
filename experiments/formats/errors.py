"""Relative errors of what a policy multiplies, in each format, by kind of linear.

Weights are of every third layer. Activations, keys, values and output gradients are those of a
float32 forward and backward on real tokens, quantized along a row as the product does it. A weight
has one error, ||q - w|| / ||w||; of the others each token has one, and the median over tokens
counts: SmolLM2 has activations of 24,929 in a few tokens, which hide all else from a mean. Of both
the median over layers is kept.

A gradient is that of the mean negative log-likelihood of the tokens, for dX: quantized along
outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.depth import short
from experiments.fake_quantization import KINDS
from experiments.formats.rows import BFLOAT16, Row, restored
from fp8rl_jax.compare.probe import ProbedLayer
from fp8rl_jax.models.cache import KVCache
from fp8rl_jax.models.forward import embed, layer_inputs
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import Policy

EVERY = 3
"""Of so many layers one is looked at."""
INPUTS = {"q_proj": "into attention", "o_proj": "o_proj", "gate_proj": "into mlp"}
INPUTS |= {"down_proj": "down_proj"}
"""Linears with an input of their own, and its name."""
CACHED = ("key", "value")

Tensors = dict[str, dict[str, np.ndarray]]
"""By role and kind: [layers, rows, columns]."""


class TappedLayer(ProbedLayer):
    """A layer that adds `given` to the results of its operations: zeros, whose gradients are those
    of the results."""

    def take(self, name: str, value):
        self.kept[name] = value
        return value + self.given[name] if name in self.given else value


def tensors_of(
    policy: Policy, tokens: Int[np.ndarray, "b t"], counted: Bool[np.ndarray, "b t"]
) -> Tensors:
    """Collect what the policy multiplies.

    Args:
        policy: float32 masters, layers stacked, one kind of layer.
        tokens: rows, -1 behind their end.
        counted: tokens whose likelihood the loss has.
    """
    config, (b, t) = policy.config, tokens.shape
    real = tokens >= 0
    rows = jnp.asarray(np.where(real, tokens, 0), jnp.int32)
    widths = {name: policy.stack.tensors()[name].value.shape[1] for name in KINDS}
    zeros = {f"{n}.out": jnp.zeros((config.num_layers, b, t, w)) for n, w in widths.items()}

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradients(added, policy):
        places = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
        cache, arguments = KVCache(), (config, policy.compute, places)
        segments = jnp.asarray(real, jnp.int32)

        def body(x, inputs):
            layer, added, inputs = inputs
            tapped = TappedLayer(*arguments, segments, cache, given=added)
            x, _ = tapped(x, layer, None, inputs)
            kept = {f"{name}.in" for name in INPUTS} | {f"{name}.out" for name in CACHED}
            return x, {name: tapped.kept[name] for name in kept}

        def pick(x: Array) -> Array:
            return x

        inputs = layer_inputs(policy, cache, None, pick, pick)
        x, kept = jax.lax.scan(body, embed(policy, rows), (policy.stack, added, inputs))
        hidden = policy.compute.rms_norm(
            x, policy.norm.value, config.rms_norm_eps, config.family.norm_offset
        )
        found = token_logprobs(hidden[:, :-1], policy, rows[:, 1:])[0]
        return -jnp.mean(found, where=jnp.asarray(counted[:, 1:])), kept

    given, kept = gradients(zeros, policy)

    def flat(x: Any) -> np.ndarray:
        """Layers of EVERY, and real tokens."""
        return np.asarray(x[::EVERY])[:, real].reshape(len(x[::EVERY]), int(real.sum()), -1)

    weights = policy.stack.tensors()
    return {
        "weight": {name: np.asarray(weights[name].value[::EVERY]) for name in KINDS},
        "activation": {kind: flat(kept[f"{name}.in"]) for name, kind in INPUTS.items()},
        "cache": {name: flat(kept[f"{name}.out"]) for name in CACHED},
        "gradient": {name: flat(given[f"{name}.out"]) for name in KINDS},
    }


def errors(row: Row, tensors: Tensors) -> dict[str, dict[str, float]]:
    """Relative errors of a row's formats, by role and kind: medians over layers, of all but weights
    over tokens before. A role that the row does not quantize is left out."""
    roles = ("weight", "activation", "cache", "gradient")
    formats = dict(
        zip(roles, (row.name, row.activation, row.activation, row.gradient), strict=True)
    )
    if row.name == BFLOAT16:
        formats = dict.fromkeys(roles, BFLOAT16)
    found = {}
    for role, name in formats.items():
        if name == "compute":
            continue
        measure = _rounded(name)
        found[role] = {
            kind: short(np.median(relative(measure, x, whole=role == "weight")))
            for kind, x in tensors[role].items()
        }
    return found


def _rounded(name: str) -> Callable:
    return jax.jit(partial(restored, name=name))


def relative(
    rounded: Callable, x: Float[np.ndarray, "layers m n"], whole: bool
) -> Float[np.ndarray, " layers"]:
    """||q - x|| / ||x|| of each layer: of a whole matrix, or the median of its rows that are not
    0."""
    error = np.asarray(rounded(jnp.asarray(x)), np.float64) - x
    axes = (1, 2) if whole else 2
    size, off = (np.linalg.norm(z, axis=axes) for z in (x, error))
    if whole:
        return off / size
    return np.asarray([np.median(o[s > 0] / s[s > 0]) for o, s in zip(off, size, strict=True)])

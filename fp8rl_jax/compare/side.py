"""One side of a comparison: a model under a recipe, as the rollout or the trainer holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fp8rl_jax import rl
from fp8rl_jax.compare.probe import excess_precision, run_layer
from fp8rl_jax.compare.tokens import Parts, Tokens
from fp8rl_jax.config.recipe import Recipe, TrainerFormats
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVCache, KVScales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.forward import embed, layer_inputs
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import Layer, Policy, unstack, with_scales
from fp8rl_jax.models.tensors import stack_of
from fp8rl_jax.precision import QTensor, QuantizedWeight, check_recipe, describe
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.calibration import observe_qkv, observe_served, scales_from_amax
from pallas_kernels.backend import Backend

Phase = Literal["trainer", "rollout"]
_NO_SHAPE = ("bos_token_id", "eos_token_ids", "pad_token_id", "max_position_embeddings")


@dataclass(frozen=True)
class Side:
    """What a comparison needs of one side.

    Attributes:
        recipe, phase: the formats are those of this phase.
        dtype: of what is not quantized.
        source: the weights before quantization, layers stacked.
        served: embedding, final norm and head in the compute dtype, `layers`, a list, and the
            scales of a quantized cache.
        excess: `excess_precision` of the side's whole program; None where nothing is computed in 16
            bits, and for exact recipes.
    """

    recipe: Recipe
    phase: Phase
    dtype: jnp.dtype
    backend: Backend
    source: Policy
    served: Policy
    excess: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        policy: Policy,
        recipe: Recipe,
        phase: Phase,
        dtype: DTypeLike,
        tokens: Tokens,
        backend: Backend = "auto",
    ) -> Side:
        """Put a policy into the side's form, KV scales calibrated on `tokens` as the recipe says.

        Args:
            policy: layers stacked, in `dtype` or float32.

        Raises:
            UserError: a recipe that cannot be computed, or KV scales that are not finite.
        """
        check_recipe(recipe, backend)
        kind = jnp.dtype(dtype)
        if phase == "trainer":
            served = jax.jit(trainer_policy, static_argnums=(1, 2, 3))(
                policy, recipe, kind, backend
            )
        else:
            served = jax.jit(
                partial(rollout_policy, recipe=recipe, dtype=kind, unroll=False, backend=backend)
            )(policy)[0]
            if recipe.quantizes_cache:
                scales = _calibrate(policy, served, recipe, kind, tokens, backend)
                served = with_scales(served, scales)
        excess = None
        if kind.itemsize == 2 and not recipe.exact:
            excess = excess_precision(served, tokens, phase == "rollout")
        return cls(recipe, phase, kind, backend, policy, unstack(served), excess)

    @property
    def formats(self) -> TrainerFormats:
        """The formats of this side's phase."""
        return self.recipe.trainer if self.phase == "trainer" else self.recipe.rollout

    @property
    def probability(self) -> str:
        """What attention's probabilities are when they multiply V."""
        fmt = self.formats.roles()["probability"]
        return fmt.name if fmt.quantized else "float32"

    @property
    def layers(self) -> list[Layer]:
        """The layers in the side's form, one by one."""
        assert not isinstance(self.served.layers, Layer)
        return list(self.served.layers)

    def embed(self, tokens: Tokens) -> Parts:
        """Embed the tokens: what enters the first layer."""
        run = jax.jit(embed)
        return Parts(run(self.served, tokens.prompts), run(self.served, tokens.completions))

    def run(
        self,
        i: int,
        x: Parts,
        tokens: Tokens,
        given: Parts | None = None,
        routes: Parts | None = None,
    ):
        """Run layer i; see `run_layer`."""
        inputs = layer_inputs(self.served, KVCache(), None, lambda z: z[i], lambda z: z[i])
        return run_layer(
            self.layers[i],
            x,
            tokens,
            inputs,
            given,
            routes,
            config=self.served.config,
            compute=self.served.compute,
            decode=self.phase == "rollout",
        )

    def norm(self, x: Parts) -> Parts:
        """Apply the final norm."""
        return Parts(*_norm(self.served, x, decode=self.phase == "rollout"))

    def logprobs(
        self, hidden: Parts, tokens: Tokens, temperature: float = 1.0
    ) -> Float[Array, "p t"]:
        """Compute log-probabilities of the completions' tokens from `hidden`, normed.

        As the sampler or the update takes them.
        """
        decode = self.phase == "rollout"
        return _logprobs(self.served, hidden, tokens, temperature, decode=decode)

    def final(self, tokens: Tokens) -> Float[Array, "p t hidden"]:
        """Run all layers: the hidden states, normed, that predict the completions' tokens."""
        x = self.embed(tokens)
        for i in range(self.served.config.num_layers):
            kept = self.run(i, x, tokens)
            x = Parts(kept.prompt["output"], kept.completion["output"])
        return _predicting(self.norm(x), tokens)

    def sharpness(
        self, hidden: Parts, tokens: Tokens, temperature: float = 1.0
    ) -> dict[str, Float[Array, ""]]:
        """Measure how sharp the loss is in the logits of the completions' last tokens
        (rl/sharpness.py), from `hidden`, normed."""
        return _sharpness(self.served, hidden, tokens, temperature)

    def tensor(self, i: int | None, name: str) -> np.ndarray | QTensor:
        """Fetch a tensor of layer i, or one outside of the layers, as it is multiplied.

        On the host.
        """
        weight = getattr(self.served, name) if i is None else self.layers[i].tensors()[name]
        value = weight.value
        return jax.device_get(value.quantized if isinstance(value, QuantizedWeight) else value)

    def source_tensor(self, i: int, name: str) -> np.ndarray:
        """Fetch a tensor of layer i before quantization, on the host."""
        stack = self.source.stack.tensors()[name].value
        return jax.device_get(stack[stack_of(self.source.config, name).index(i)])

    def formats_of(self, i: int, name: str) -> TrainerFormats:
        """The formats of a linear of layer i on this side."""
        return getattr(self.recipe.of_linear(f"layers.{i}.{name}"), self.phase)

    def weight_format(self, i: int | None, name: str, value: np.ndarray | QTensor) -> str:
        """Name the format of a weight: of the recipe, or its dtype."""
        if not isinstance(value, QTensor):
            return str(value.dtype)
        assert i is not None  # nothing outside of the layers is quantized
        return describe(self.formats_of(i, name).weight)


def check_alike(configs: Sequence[PolicyConfig], names: Sequence[str | Path]) -> None:
    """Raise UserError where two models are not of one shape, naming what they differ in."""
    one, other = (
        {k: v for k, v in vars(config).items() if k not in _NO_SHAPE} for config in configs
    )
    if unlike := [f"{key} ({one[key]} and {other[key]})" for key in one if one[key] != other[key]]:
        raise UserError(
            f"{names[0]} and {names[1]} cannot be compared: they differ in {', '.join(unlike)}"
        )


def update_served(
    start: Policy, policy: Policy, recipe: Recipe, dtype: DTypeLike
) -> dict[str, dict[str, float | None]]:
    """Measure what of an update a rollout serves, as `rollout.arrival` defines it.

    Args:
        start, policy: before and after it, float32, layers stacked.

    Returns:
        {kind of tensor, "all" first: {"changed", "arrived", "noise", "cosine"}}; None where the
        weights have not moved.
    """
    form = jax.jit(lambda p: rollout_policy(p, recipe, jnp.dtype(dtype), False)[0])
    arrival = Arrival()
    arrival.see(start, form(start))
    found = arrival.see(policy, form(policy))
    kinds = {"all": {k.removeprefix("sync/"): float(x) for k, x in found.items()}} | arrival.kinds
    return {
        kind: {name: x if np.isfinite(x) else None for name, x in of_kind.items()}
        for kind, of_kind in kinds.items()
    }


def describe_side(model: str, side: Side) -> dict[str, Any]:
    """Describe a side, for `comparison.document`."""
    formats = {
        role: describe(fmt) if fmt.quantized else str(side.dtype)
        for role, fmt in side.formats.roles().items()
        if role != "probability"
    } | {"probability": side.probability}
    return {
        "model": model,
        "recipe": side.recipe.name,
        "phase": side.phase,
        "compute_dtype": str(side.dtype),
        "backend": side.backend,
        "exact": side.recipe.exact,
        "formats": formats,
    }


def _calibrate(
    policy: Policy,
    served: Policy,
    recipe: Recipe,
    dtype: jnp.dtype,
    tokens: Tokens,
    backend: Backend,
) -> KVScales:
    prompts = tokens.prompts, tokens.prompt_lengths
    if recipe.kv_calibration != "rollout":
        completions = tokens.completions, tokens.masks.completion
        observed = observe_qkv(
            policy, *prompts, *completions, recipe=recipe, dtype=dtype, backend=backend
        )
    else:
        observed = observe_served(served, *prompts, recipe=recipe)
    scales = scales_from_amax(observed.amax, recipe)
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(scales)):
        raise UserError(
            f"recipe {recipe.name!r}: the KV scales are not finite; the weights are broken or "
            f"overflow {dtype}"
        )
    return scales


@partial(jax.jit, static_argnames="decode")
def _norm(policy: Policy, x: Parts, *, decode: bool):
    def norm(z):
        return policy.compute.rms_norm(
            z, policy.norm.value, policy.config.rms_norm_eps, policy.config.family.norm_offset
        )

    if not decode:
        return norm(x.prompt), norm(x.completion)
    by_token = jnp.moveaxis(x.completion, 1, 0)[:, :, None]
    return norm(x.prompt), jnp.moveaxis(jax.lax.map(norm, by_token)[:, :, 0], 0, 1)


def _predicting(x: Parts, tokens: Tokens) -> Float[Array, "p t hidden"]:
    """The hidden states, normed, that predict the completions' tokens."""
    last = jnp.take_along_axis(x.prompt, (tokens.prompt_lengths - 1)[:, None, None], axis=1)
    return jnp.concatenate([last, x.completion[:, :-1]], axis=1)


@jax.jit
def _sharpness(policy: Policy, x: Parts, tokens: Tokens, temperature: float):
    hidden, last = _predicting(x, tokens), (tokens.completion_lengths - 1)[:, None]
    ends = jnp.take_along_axis(hidden, last[..., None], axis=1)[:, 0]
    logits = policy.compute.product(ends, policy.head) / temperature
    target = jnp.take_along_axis(tokens.completions, last, axis=1)[:, 0]
    return rl.metric_values(rl.sharpness_metrics(logits, target, tokens.completion_lengths > 0))


@partial(jax.jit, static_argnames=("temperature", "decode"))
def _logprobs(policy: Policy, x: Parts, tokens: Tokens, temperature: float, *, decode: bool):
    hidden = _predicting(x, tokens)
    if not decode:
        return token_logprobs(hidden, policy, tokens.completions, temperature)[0]

    compute = policy.compute

    def one(now):
        row, token = now
        return compute.logprob(compute.product(row, policy.head), token, temperature)

    return jax.lax.map(one, (jnp.moveaxis(hidden, 1, 0), tokens.completions.T)).T

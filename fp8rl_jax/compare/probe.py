"""What a side computes: one layer, all values of its operations kept, and whole programs.

The layer is the model's own `TransformerLayer`; what is added is a look at its operations. So what
is compared is what is computed: the very operands that reach a product, and its result.

    rollout    the prompt as a whole, then the completion a token at a time over a cache, as the
               sampler does
    trainer    the prompt as a whole, then the completion as a whole over the prompt's keys, as the
               update does

A layer can be given the values of another side. Each operation then computes on the other side's
input, and hands the other side's result on: its result is its own contribution, and nothing that
came from layers or operations before it.

A comparison takes a layer at a time, with every result in memory. In a whole program nothing is in
memory that need not be, and what the code leaves to the compiler shows: XLA may keep a 16-bit
result in float32 (excess precision), in each program where it likes. So each program is run twice,
as it is and with that forbidden; where roundings are explicit no bit changes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax.compare.causes import logprob_differences
from fp8rl_jax.compare.tokens import Parts, Tokens
from fp8rl_jax.models.attention import CachePart, LayerInputs, quantize_heads
from fp8rl_jax.models.cache import KVBlock, KVCache, empty_block
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import predequantized
from fp8rl_jax.models.forward import TransformerLayer, forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.moe import choose, mixture
from fp8rl_jax.models.policy import Layer, Policy
from fp8rl_jax.precision import (
    Compute,
    QTensor,
    QuantizedInput,
    as_weight,
    is_quantized,
    predequantize,
    quantize,
)
from fp8rl_jax.rollout.sampler import cache_dtype
from pallas_kernels.qtensor import from_bits

Values = dict[str, Any]
"""By name: "input" and "output" of the layer; "<operation>.in" and ".out", arrays [b, t, ...];
".operand", QTensors or arrays in FP8 (whose scales were calibrated) with these leading axes, where
an operand is quantized;
"router.ids" [b, t, k], and as "router.out" the weight of every expert, 0 for those that are not
chosen. Entries of experts are [b, t, k, ...]."""


class ProbedLayer(TransformerLayer):
    """`TransformerLayer` that keeps every value in `kept`, and goes on with the values of `given`
    where that has the name."""

    def __init__(self, *arguments, given: Values | None = None):
        super().__init__(*arguments, observe=self._heads)
        self.kept: Values = {}
        self.given = given or {}
        self._names: dict[int, str] = {}
        self._operands: dict[Any, Any] = {}

    def __call__(self, x, layer: Layer, part: CachePart | None, inputs: LayerInputs):
        self._names = {id(weight): name for name, weight in layer.tensors().items()}
        self.kept["input"] = x
        x, outputs = super().__call__(x, layer, part, inputs)
        self.kept["output"] = x
        return x, outputs

    def take(self, name: str, value):
        """Keep `value`, and return what the computation goes on with."""
        self.kept[name] = value
        return self.given[name].astype(value.dtype) if name in self.given else value

    def norm(self, x, weight, eps=None):
        """Apply a norm, and keep what enters and leaves it."""
        if weight is None:
            return x
        name = self._names[id(weight)]
        return self.take(f"{name}.out", super().norm(self.take(f"{name}.in", x), weight, eps))

    def project(self, x, *weights):
        """Multiply with each weight, and keep input, operands and results."""
        names = [self._names[id(weight)] for weight in weights]
        self._operands = {}
        out = super().project(self.take(f"{names[0]}.in", x), *weights)
        for name, weight in zip(names, weights, strict=True):
            operand = self._operands[jax.tree.structure(as_weight(weight.value))]
            self._keep_operand(
                name, operand, lambda leaf: leaf.reshape(*self.positions.shape, leaf.shape[-1])
            )
        return [self.take(f"{name}.out", y) for name, y in zip(names, out, strict=True)]

    def prepare(self, x, weight):
        self._operands[jax.tree.structure(weight)] = made = super().prepare(x, weight)
        return made

    def routed(self, x, layer: Layer, routes):
        x = self.take("router.in", x)
        experts, tensors = self.config.mixture, layer.tensors()
        router, bias = (tensors.get(name) for name in ("router", "router_bias"))
        assert router is not None
        added = None if bias is None else bias.value
        ids, weights = choose(x, router.value, experts, self.compute, bias=added)
        self.kept["router.ids"] = ids
        self.kept["router.out"] = jnp.put_along_axis(
            jnp.zeros((*ids.shape[:-1], experts.count)),
            ids,
            weights,
            axis=-1,
            inplace=False,
        )
        out, used = mixture(x, layer, experts, self.compute, routes, probe=self._expert_rows)
        return self.take("mixture.out", out), used

    def _expert_rows(self, name: str, rows, order):
        assert self.config.experts is not None
        axes = (*self.positions.shape, self.config.experts.per_token)
        if name.endswith(".operand"):
            self._keep_operand(
                name.removesuffix(".operand"), rows, lambda leaf: _put_back(leaf, order, axes)
            )
            return rows
        value = self.take(name, _put_back(rows, order, axes))
        return value.reshape(rows.shape)[order]

    def _keep_operand(self, name: str, operand, change=lambda leaf: leaf):
        if isinstance(operand, QuantizedInput):
            operand = from_bits(operand.quantized)
        if isinstance(operand, QTensor):
            self.kept[f"{name}.operand"] = jax.tree.map(change, operand)

    def _heads(self, q, k, v, real, scales):
        formats = (self.compute.query, self.compute.key, self.compute.value)
        for name, x, fmt, scale in zip(
            ("query", "key", "value"), (q, k, v), formats, scales or (None,) * 3, strict=True
        ):
            if name != "value":  # dimensions share scales in the checkpoint's order
                x = self.mixer.pairs_back(x)
            self.kept[f"{name}.out"] = x
            if fmt.calibrated:
                assert scale is not None
                self.kept[f"{name}.operand"] = quantize_heads(x, scale, fmt)
            elif fmt.quantized:
                self.kept[f"{name}.operand"] = quantize(x, fmt, self.compute.backend)
        return None, scales


def _put_back(rows, order, axes):
    """Rows sorted by expert as [b, t, k, ...], the entries of a token in the order of its ids."""
    return (
        jnp.zeros_like(rows)
        .at[order]
        .set(rows, unique_indices=True)
        .reshape(*axes, *rows.shape[1:])
    )


@partial(jax.jit, static_argnames=("config", "compute", "decode"))
def run_layer(
    layer: Layer,
    x: Parts,
    tokens: Tokens,
    inputs: LayerInputs,
    given: Parts | None = None,
    routes: Parts | None = None,
    *,
    config: PolicyConfig,
    compute: Compute,
    decode: bool,
) -> Parts:
    """Run one layer on the prompts and completions, and keep the values of its operations.

    Args:
        layer: in the side's form.
        x: hidden states that enter, of the prompts [p, s, hidden] and the completions [p, t,
            hidden].
        inputs: the layer's scales, window and frequencies.
        given: `Values` of another side, of the entries to compute with in place of this side's.
        routes: expert ids to replay, where they are.
        compute: of the side's form.
        decode: the rollout's way through the completions, not the trainer's.

    Returns:
        `Values` of both parts; "output" is what enters the next layer.
    """
    if decode:
        layer = jax.tree.map(
            lambda x: predequantize(x, compute) if is_quantized(x) else x,
            layer,
            is_leaf=is_quantized,
        )
    masks, given, routes = tokens.masks, given or Parts({}, {}), routes or Parts(None, None)
    step = partial(ProbedLayer, config, compute)
    positions = jnp.broadcast_to(
        jnp.arange(tokens.prompts.shape[1], dtype=jnp.int32), tokens.prompts.shape
    )
    first = step(positions, masks.prompt.astype(jnp.int32), KVCache(), given=given.prompt)
    block = first(x.prompt, layer, None, inputs._replace(routes=routes.prompt))[1].block
    prefix = KVBlock(*block, masks.prompt, positions)
    inputs, width = inputs._replace(prefix=block), tokens.completions.shape[1]
    if not decode:
        places = tokens.prompt_lengths[:, None] + jnp.arange(width)
        second = step(
            places, masks.completion.astype(jnp.int32), KVCache(prefix), given=given.completion
        )
        second(x.completion, layer, None, inputs._replace(routes=routes.completion))
        return Parts(first.kept, second.kept)

    def one(completion, now):
        t, x, given, routes = now
        places = (tokens.prompt_lengths + t)[:, None]
        cache = KVCache(prefix, KVBlock(*completion, jnp.zeros((len(x), width), bool)), t)
        probed = step(places, jnp.ones_like(places), cache, given=given)
        out = probed(x, layer, (*completion, None), inputs._replace(routes=routes))[1]
        return out.block, probed.kept

    empty = tuple(jnp.zeros((*z.shape[:2], width, z.shape[3]), z.dtype) for z in block)
    by_token = jax.tree.map(
        lambda z: jnp.moveaxis(z, 1, 0)[:, :, None],
        (x.completion, given.completion, routes.completion),
    )
    _, kept = lax.scan(one, empty, (jnp.arange(width), *by_token))
    return Parts(first.kept, jax.tree.map(lambda z: jnp.moveaxis(z[:, :, 0], 0, 1), kept))


def at_once(policy: Policy, tokens: Tokens) -> Float[Array, "p t"]:
    """Compute log-probabilities as the update does: a prompt, then its completion over its keys.

    Args:
        policy: in the form of a side; with the rollout's it is the trainer's program in the
            rollout's formats.
    """
    return with_entropies(policy, tokens)[0]


def with_entropies(
    policy: Policy, tokens: Tokens
) -> tuple[Float[Array, "p t"], Float[Array, "p t"]]:
    """Compute what `at_once` does, and the entropies of the distributions, in nats."""
    lengths, masks, width = tokens.prompt_lengths, tokens.masks, tokens.completions.shape[1]
    run = partial(forward, policy)
    prompt = run(tokens.prompts, segment_ids=masks.prompt.astype(jnp.int32))
    cache, positions = KVCache(prompt.cache), lengths[:, None] + jnp.arange(width)
    rest = run(
        tokens.completions, positions, masks.completion.astype(jnp.int32), cache, keep_cache=False
    )
    last = jnp.take_along_axis(prompt.hidden, (lengths - 1)[:, None, None], axis=1)
    hidden = jnp.concatenate([last, rest.hidden[:, :-1]], axis=1)
    return token_logprobs(hidden, policy, tokens.completions)


def one_by_one(policy: Policy, tokens: Tokens) -> Float[Array, "p t"]:
    """Compute log-probabilities as the sampler does: prefill, then a token at a time over its
    cache.

    Args:
        policy: in the rollout's form.
    """
    policy = predequantized(policy)
    compute, lengths, completions = policy.compute, tokens.prompt_lengths, tokens.completions
    width = completions.shape[1]
    segments = tokens.masks.prompt.astype(jnp.int32)
    prefill = forward(policy, tokens.prompts, segment_ids=segments)
    last = jnp.take_along_axis(prefill.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    empty = empty_block(policy.config, len(completions), width, cache_dtype(policy), policy.stacked)

    def logprob(hidden, token):
        return compute.logprob(compute.product(hidden, policy.head), token, 1.0)

    def step(kept, now):
        t, token, following = now
        cache = KVCache(prefill.cache, KVBlock(*kept, empty.mask), t)
        result = forward(policy, token[:, None], (lengths + t)[:, None], cache=cache)
        assert result.cache is not None
        return (result.cache.keys, result.cache.values), logprob(result.hidden[:, 0], following)

    first = logprob(last, completions[:, 0])
    steps = (jnp.arange(width - 1), completions[:, :-1].T, completions[:, 1:].T)
    _, rest = lax.scan(step, (empty.keys, empty.values), steps)
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def excess_precision(policy: Policy, tokens: Tokens, rollout: bool) -> dict[str, Any]:
    """Compare a side's whole program with itself, compiled without XLA's excess precision."""
    run = one_by_one if rollout else at_once
    allowed, forbidden = (
        jax.jit(run, compiler_options={"xla_allow_excess_precision": kept})(policy, tokens)
        for kept in (True, False)
    )
    return logprob_differences(
        np.asarray(allowed), np.asarray(forbidden), np.asarray(tokens.masks.completion)
    )

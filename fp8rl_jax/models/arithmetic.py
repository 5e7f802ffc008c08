"""What a policy computes besides its linears, in two arithmetics with the same signatures.

PLAIN is what XLA makes fastest. EXACT gives each token the same bits whatever else is in the batch,
however it is padded, chunked or cached, because each result depends on the order of nothing
(pallas_kernels.exact); its gradients are PLAIN's. A recipe with `exact` runs the rollout and the
trainer in EXACT, and their log-probabilities are then equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.models import rotary
from pallas_kernels import exact
from pallas_kernels.attention import KeyBlock, attention
from pallas_kernels.exact import as_float64, materialize, round_to_24_bits, with_float64
from pallas_kernels.matmul import dot
from pallas_kernels.rounding import rounded

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


class Arithmetic(NamedTuple):
    """The functions of a forward pass; their plain forms are in this file, in `rotary` and in
    pallas_kernels."""

    exact: bool
    add: Callable
    scale: Callable
    rms_norm: Callable
    rope_tables: Callable
    rotate: Callable
    attend: Callable
    gated: Callable
    dot: Callable
    routing: Callable
    normalize: Callable
    combine: Callable
    logprob: Callable


def rms_norm(
    x: Float[Array, "*b dim"], weight: Float[Array, " dim"], eps: float, offset: float = 0.0
) -> Float[Array, "*b dim"]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) (arXiv 1910.07467), in float32, result in x's
    dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gain = weight.astype(jnp.float32)
    return rounded(normed * (gain + offset if offset else gain), x.dtype)


def add(x: Float[Array, "*b n"], y: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    """x + y in float32, rounded once to their dtype."""
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def scale(x: Float[Array, "*b n"], factor: float) -> Float[Array, "*b n"]:
    """x * factor, the factor in x's dtype."""
    return rounded(
        x.astype(jnp.float32) * jnp.asarray(factor, x.dtype).astype(jnp.float32), x.dtype
    )


def gated(
    gate: Float[Array, "*b n"], up: Float[Array, "*b n"], activation: str
) -> Float[Array, "*b n"]:
    """activation(gate) * up (GLU variants, arXiv 2002.05202) in float32, rounded behind the
    activation and behind the product, as torch and vLLM round it."""
    active = rounded(ACTIVATIONS[activation](gate.astype(jnp.float32)), gate.dtype)
    return rounded(active.astype(jnp.float32) * up.astype(jnp.float32), gate.dtype)


def routing(
    x: Float[Array, "*b hidden"], router: Float[Array, "experts hidden"]
) -> Float[Array, "*b experts"]:
    """softmax of the router's scores, float32."""
    logits = jnp.einsum(
        "...h,eh->...e",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    return jax.nn.softmax(logits, axis=-1)


def normalize(weights: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
    """Gate weights that add up to 1."""
    return weights / weights.sum(axis=-1, keepdims=True)


def combine(
    weights: Float[Array, "b t k"], out: Float[Array, "b t k hidden"]
) -> Float[Array, "b t hidden"]:
    """The experts' outputs, summed with their weights, float32."""
    return jnp.einsum("btk,btkh->bth", weights, out.astype(jnp.float32))


def logprob(
    logits: Float[Array, "*b vocab"], tokens: Int[Array, "*b"], temperature: float
) -> Float[Array, "*b"]:
    """log softmax(logits / temperature) of the tokens."""
    every = jax.nn.log_softmax(logits / temperature, axis=-1)
    return jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]


PLAIN = Arithmetic(
    exact=False,
    add=add,
    scale=scale,
    rms_norm=rms_norm,
    rope_tables=rotary.rope_tables,
    rotate=rotary.rotate,
    attend=attention,
    gated=gated,
    dot=dot,
    routing=routing,
    normalize=normalize,
    combine=combine,
    logprob=logprob,
)


@with_float64
def _add(x, y):
    return rounded(as_float64(x) + as_float64(y), x.dtype)


@with_float64
def _scale(x, factor):
    return rounded(as_float64(x) * jnp.float64(factor), x.dtype)


@with_float64
def _rms_norm(x, weight, eps, offset):
    numbers, count = as_float64(x), x.shape[-1]
    squares = exact.reproducible_sum(numbers * numbers, -1)[..., None]
    inverse = round_to_24_bits(jnp.sqrt(count / (squares + count * eps)))
    gain = round_to_24_bits(as_float64(weight) + offset)
    return rounded(numbers * inverse * gain, x.dtype)


@with_float64
def _rope_tables(frequencies, positions):
    # a position and a frequency have 24 bits each, so the angle is exact
    angles = materialize(as_float64(positions)[..., None] * as_float64(frequencies))
    return rounded(jnp.cos(angles), jnp.float32), rounded(jnp.sin(angles), jnp.float32)


@with_float64
def _rotate(x, tables):
    cos, sin = (as_float64(table)[:, :, None, :] for table in tables)
    first, second = jnp.split(as_float64(x), 2, axis=-1)
    return rounded(
        jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype
    )


@with_float64
def _gated(gate, up, activation):
    x = as_float64(gate)
    argument = x
    if activation == "gelu_pytorch_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        inner = round_to_24_bits(
            round_to_24_bits(x * x) * round_to_24_bits(jnp.float64(0.044715)) + 1
        )
        argument = round_to_24_bits(x * inner) * round_to_24_bits(
            jnp.float64(2 * 0.7978845608028654)
        )
    return rounded(x * exact.sigmoid(argument) * as_float64(up), gate.dtype)


def _attend(query, blocks, score_scale, value_scale, out_dtype, *, backend):
    if not (isinstance(score_scale, float) and isinstance(value_scale, float)):
        raise ValueError("exact attention has no quantized cache")

    def plain(query, keys, values, masks):
        parts = [KeyBlock(*part) for part in zip(keys, values, masks, strict=True)]
        return attention(query, parts, score_scale, value_scale, out_dtype, backend=backend)

    def exactly(query, keys, values, masks):
        return exact.attend(query, keys, values, masks, score_scale * value_scale).astype(out_dtype)

    run = exact.with_gradient_of(plain, exactly)
    return run(query, *map(list, zip(*blocks, strict=True)))


@with_float64
def _softmax(logits):
    x = as_float64(logits)
    weights = materialize(exact.exp(x - x.max(axis=-1, keepdims=True)))
    return rounded(weights / exact.reproducible_sum(weights, -1)[..., None], jnp.float32)


def _routing(x, router):
    logits = exact.dot(x.astype(jnp.float32), router.astype(jnp.float32))
    return exact.with_gradient_of(partial(jax.nn.softmax, axis=-1), _softmax)(logits)


@with_float64
def _normalize(weights):
    return rounded(
        as_float64(weights) / exact.reproducible_sum(as_float64(weights), -1)[..., None],
        jnp.float32,
    )


@with_float64
def _combine(weights, out):
    # exact; added in the order of the token's own ranking
    parts = as_float64(weights)[..., None] * as_float64(out)
    total = parts[..., 0, :]
    for i in range(1, parts.shape[-2]):
        total = total + parts[..., i, :]
    # the model's dtype right away: nothing is left for a later conversion to round
    return rounded(total, out.dtype).astype(jnp.float32)


@with_float64
def _logprob(logits, tokens, temperature):
    x = materialize(round_to_24_bits(as_float64(logits) * (1 / as_float64(temperature))))
    shifted = x - materialize(x.max(axis=-1, keepdims=True))
    normalizer = exact.log(materialize(exact.reproducible_sum(exact.exp(shifted), -1)))
    chosen = jnp.take_along_axis(shifted, tokens[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return rounded(chosen - normalizer, jnp.float32)


def _exact(plain: Callable, exactly: Callable, arrays: int) -> Callable:
    """`exactly` with the gradient of `plain`; both take `arrays` trees of arrays first and then
    constants."""

    def run(*args):
        fixed = args[arrays:]
        same = exact.with_gradient_of(
            lambda *xs: plain(*xs, *fixed), lambda *xs: exactly(*xs, *fixed)
        )
        return same(*args[:arrays])

    return run


_tempered = _exact(PLAIN.logprob, _logprob, 3)

EXACT = Arithmetic(
    exact=True,
    add=_exact(PLAIN.add, _add, 2),
    scale=_exact(PLAIN.scale, _scale, 1),
    rms_norm=_exact(PLAIN.rms_norm, _rms_norm, 2),
    rope_tables=_rope_tables,
    rotate=_exact(PLAIN.rotate, _rotate, 2),
    attend=_attend,
    gated=_exact(PLAIN.gated, _gated, 2),
    dot=exact.dot,
    routing=_routing,
    normalize=_exact(PLAIN.normalize, _normalize, 1),
    combine=_exact(PLAIN.combine, _combine, 2),
    logprob=lambda logits, tokens, temperature: _tempered(
        logits, tokens, jnp.asarray(temperature, jnp.float32)
    ),
)


def arithmetic(exactly: bool) -> Arithmetic:
    """EXACT or PLAIN."""
    return EXACT if exactly else PLAIN

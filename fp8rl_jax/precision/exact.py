"""Exact mode: each token's results have the same bits whatever else is in the batch.

However a batch is padded, chunked, cached or split. A recipe with `exact` runs the rollout and the
trainer so, and their log-probabilities are then equal bit for bit. There are three arithmetics for
it, of which `exact_compute` chooses; gradients are those of `Compute` in all.

    InvariantCompute  `Compute`, each operation compiled by itself, sums and products in an order of
                      their own (pallas_kernels.invariant): right by test, nearly as fast, on one
                      CPU device. Attention takes a query's keys in their order, by a CPU kernel;
                      without one, or where probabilities are cast, it is order-free, as XLA's
                      order differs between a cache and a row of the trainer.
    HopperCompute     the same with the kernels of one Hopper GPU, attention included: every query
                      meets its keys in the order of a decode step
    OrderFreeCompute  results depend on the order of nothing (pallas_kernels.exact): right by
                      argument, several times slower, on every CPU, GPU and mesh
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from fp8rl_jax.precision.compute import Compute
from fp8rl_jax.precision.formats import element_dtype
from fp8rl_jax.precision.quantizer import dequantize_rows
from pallas_kernels import QTensor, exact, invariant
from pallas_kernels.attention import PROBABILITY_FACTOR, KeyBlock, attention
from pallas_kernels.attention import cpu as attention_cpu
from pallas_kernels.backend import Backend
from pallas_kernels.exact import (
    as_float64,
    materialize,
    round_to_24_bits,
    with_float64,
    with_gradient_of,
)
from pallas_kernels.matmul import selected_backend
from pallas_kernels.quantize import dequantize
from pallas_kernels.quantize.reference import on_grid
from pallas_kernels.rounding import rounded


def exact_compute(backend: Backend = "auto") -> type[ExactCompute]:
    """Choose the arithmetic of exact mode on this machine.

    Raises:
        BackendError: this backend has none here.
    """
    invariant.check_available(backend)
    if selected_backend(backend) == "hopper":
        return HopperCompute
    return InvariantCompute if invariant.is_available(backend) else OrderFreeCompute


@dataclass(frozen=True)
class ExactCompute(Compute):
    """What the arithmetics share."""

    exact = True

    def add(self, x, y):
        # one rounding, behind a barrier: a product that feeds it would be added without its own
        return super().add(*materialize((x, y)))

    def attend(self, query, blocks, score_scale, value_scale, out_dtype):
        if not (isinstance(score_scale, float) and isinstance(value_scale, float)):
            raise ValueError("exact attention has no quantized cache")
        scale, attend = score_scale * value_scale, super().attend

        def plain(query, blocks):
            return attend(query, blocks, scale, 1.0, out_dtype)

        exactly = partial(self.attended, scale=scale, out_dtype=out_dtype)
        return with_gradient_of(plain, exactly)(query, blocks)

    def attended(
        self, query: jax.Array, blocks: list[KeyBlock], scale: float, out_dtype: jnp.dtype
    ) -> jax.Array:
        """Attention without a gradient."""
        keys, values, masks = zip(*blocks, strict=True)
        found = exact.attend(query, [*keys], [*values], [*masks], scale, self.cast())
        return found.astype(out_dtype)

    def rope_tables(self, frequencies, positions, amplitude=1.0):
        # the product would be rounded together with what uses it
        return materialize(super().rope_tables(frequencies, positions, amplitude))

    def cast(self) -> Callable[[jax.Array], jax.Array] | None:
        """What attention's probabilities become before they multiply V; None: what they are."""
        if not self.probability.quantized:
            return None
        dtype = element_dtype(self.probability)
        return lambda x: on_grid(x * PROBABILITY_FACTOR, dtype) / PROBABILITY_FACTOR

    def quantized_product(self, x, w, group_sizes, out_dtype):
        wide = dequantize_rows(x, self.backend), dequantize(w, backend=self.backend)
        return self.product(*wide, group_sizes, out_dtype)


@dataclass(frozen=True)
class InvariantCompute(ExactCompute):
    """Each operation of `Compute` by itself, on a CPU."""

    def attended(self, query, blocks, scale, out_dtype):
        keys, values, masks = map(list, zip(*blocks, strict=True))
        if self.probability.quantized or not self.packs or attention_cpu.lacks(keys, values):
            return super().attended(query, blocks, scale, out_dtype)
        return attention_cpu.attend(query, keys, values, masks, scale, out_dtype)

    def row_sum(self, x):
        return invariant.row_sum(x, backend=self.backend)

    def scale(self, x, factor):
        return invariant.isolated(partial(super().scale, factor=factor))(x)

    def row_mean(self, x):
        return invariant.isolated(super().row_mean)(x)

    def rms_norm(self, x, weight, eps, offset=0.0):
        norm = super().rms_norm
        return invariant.isolated(lambda x, weight: norm(x, weight, eps, offset))(x, weight)

    def turns(self, frequencies, positions):
        angles = materialize(positions[..., None].astype(jnp.float32) * frequencies)
        return materialize((jnp.cos(angles), jnp.sin(angles)))

    def rotate(self, x, tables):
        return invariant.isolated(super().rotate)(x, tables)

    def gated(self, gate, up, activation):
        return invariant.isolated(partial(super().gated, activation=activation))(gate, up)

    def routing(self, x, router, scoring="softmax"):
        logits = self.product(x.astype(jnp.float32), router.astype(jnp.float32))
        if scoring == "sigmoid":
            return invariant.isolated(jax.nn.sigmoid)(logits)
        return self.normalize(self.softmax_terms(logits, 1.0)[1])

    def normalize(self, weights):
        return invariant.isolated(super().normalize)(weights)

    def combine(self, weights, out):
        def exactly(weights, out):
            weights, out = materialize((weights, out))
            return materialize(_in_order(materialize(weights[..., None] * out.astype(jnp.float32))))

        return with_gradient_of(super().combine, exactly)(weights, out)

    def softmax_terms(self, logits, temperature):
        def exactly(logits, temperature):
            # what is fused with a maximum depends on the number of rows
            scaled = materialize(jnp.divide(*materialize((logits, temperature))))
            largest = materialize(scaled.max(axis=-1, keepdims=True))
            shifted = materialize(scaled - largest)
            return shifted, materialize(jnp.exp(shifted))

        run = with_gradient_of(super().softmax_terms, exactly)
        return run(logits, jnp.asarray(temperature, jnp.float32))

    def logprob_of(self, shifted, total, tokens):
        return invariant.isolated(super().logprob_of)(shifted, total, tokens)

    def product(self, x, w, group_sizes=None, out_dtype=jnp.float32):
        if group_sizes is None:
            return invariant.dot(x, w, out_dtype, backend=self.backend)
        return invariant.grouped_dot(x, w, group_sizes, out_dtype, backend=self.backend)

    def add_scaled(self, x, y, factor):
        return invariant.isolated(partial(super().add_scaled, factor=factor))(x, y)

    def prepared(self, w):
        quantized = isinstance(w, QTensor)
        wide = dequantize(w, backend=self.backend) if quantized else w.astype(jnp.float32)
        return self.in_panels(wide)


@dataclass(frozen=True)
class HopperCompute(InvariantCompute):
    """Each operation by itself, its sums and products by kernels."""

    def attended(self, query, blocks, scale, out_dtype):
        found = attention(
            query, blocks, scale, 1.0, out_dtype, key_order="decode", backend=self.backend
        )
        return materialize(found)

    def quantized_product(self, x, w, group_sizes, out_dtype):
        # not ExactCompute's, which multiplies dequantized operands
        return materialize(Compute.quantized_product(self, x, w, group_sizes, out_dtype))

    def prepared(self, w):
        return None


@dataclass(frozen=True)
class OrderFreeCompute(ExactCompute):
    """The arithmetic of pallas_kernels.exact, the referee of the others."""

    def row_sum(self, x):
        return with_gradient_of(super().row_sum, _row_sum)(x)

    def scale(self, x, factor):
        return _of_arrays(super().scale, _scale, factor)(x)

    def rms_norm(self, x, weight, eps, offset=0.0):
        return _of_arrays(super().rms_norm, _rms_norm, eps, offset)(x, weight)

    def turns(self, frequencies, positions):
        return _turns(frequencies, positions)

    def rotate(self, x, tables):
        return with_gradient_of(super().rotate, _rotate)(x, tables)

    def gated(self, gate, up, activation):
        return _of_arrays(super().gated, _gated, activation)(gate, up)

    def routing(self, x, router, scoring="softmax"):
        logits = exact.dot(x.astype(jnp.float32), router.astype(jnp.float32))
        if scoring == "sigmoid":
            return with_gradient_of(jax.nn.sigmoid, _sigmoid)(logits)
        return with_gradient_of(partial(jax.nn.softmax, axis=-1), _softmax)(logits)

    def normalize(self, weights):
        return with_gradient_of(super().normalize, _normalize)(weights)

    def combine(self, weights, out):
        return with_gradient_of(super().combine, _combine)(weights, out)

    def softmax_terms(self, logits, temperature):
        run = with_gradient_of(super().softmax_terms, _softmax_terms)
        return run(logits, jnp.asarray(temperature, jnp.float32))

    def logprob_of(self, shifted, total, tokens):
        return with_gradient_of(super().logprob_of, _logprob_of)(shifted, total, tokens)

    def product(self, x, w, group_sizes=None, out_dtype=jnp.float32):
        if group_sizes is None:
            return exact.dot(x, w, out_dtype)
        return exact.grouped_dot(x, w, group_sizes, out_dtype)

    def add_scaled(self, x, y, factor):
        return exact.add_scaled(x, y, factor)

    def prepared(self, w):
        return exact.to_integers(w.dequantize() if isinstance(w, QTensor) else w)


def _of_arrays(plain: Callable, exactly: Callable, *constants) -> Callable:
    """`exactly` with the gradient of `plain`; both take arrays first and then these constants."""
    return with_gradient_of(
        lambda *arrays: plain(*arrays, *constants), lambda *arrays: exactly(*arrays, *constants)
    )


def _in_order(parts):
    """The sum over the last axis but one, in the order of a token's ranking."""
    total = parts[..., 0, :]
    for i in range(1, parts.shape[-2]):
        total = total + parts[..., i, :]
    return total


@with_float64
def _row_sum(x):
    return rounded(exact.reproducible_sum(as_float64(x), -1)[..., None], jnp.float32)


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
def _turns(frequencies, positions):
    # a position and a frequency have 24 bits each, so the angle is exact
    angles = materialize(as_float64(positions)[..., None] * as_float64(frequencies))
    return rounded(jnp.cos(angles), jnp.float32), rounded(jnp.sin(angles), jnp.float32)


@with_float64
def _rotate(x, tables):
    cos, sin = (as_float64(table)[:, :, None, :] for table in tables)
    first, second = jnp.split(as_float64(x), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return rounded(jnp.concatenate(turned, axis=-1), x.dtype)


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


@with_float64
def _sigmoid(logits):
    return rounded(exact.sigmoid(as_float64(logits)), jnp.float32)


@with_float64
def _softmax(logits):
    x = as_float64(logits)
    weights = materialize(exact.exp(x - x.max(axis=-1, keepdims=True)))
    return rounded(weights / exact.reproducible_sum(weights, -1)[..., None], jnp.float32)


@with_float64
def _normalize(weights):
    return rounded(
        as_float64(weights) / exact.reproducible_sum(as_float64(weights), -1)[..., None],
        jnp.float32,
    )


@with_float64
def _combine(weights, out):
    total = _in_order(as_float64(weights)[..., None] * as_float64(out))  # of exact products
    # in the model's dtype right away: nothing is left for a later conversion to round
    return rounded(total, out.dtype).astype(jnp.float32)


@with_float64
def _softmax_terms(logits, temperature):
    x = materialize(round_to_24_bits(as_float64(logits) * (1 / as_float64(temperature))))
    shifted = round_to_24_bits(x - x.max(axis=-1, keepdims=True))
    return shifted.astype(jnp.float32), rounded(exact.exp(shifted), jnp.float32)


@with_float64
def _logprob_of(shifted, total, tokens):
    chosen = jnp.take_along_axis(shifted, tokens[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return rounded(as_float64(chosen) - exact.log(as_float64(total[..., 0])), jnp.float32)

"""The FP8 linear that is trained: forward and backward of one product, each operand in the format
that the recipe names.

The forward is the rollout's: X in 1x128 groups times W in 128x128 blocks. The backward has two
products more, and each wants its operands grouped along its own contraction, because a scale must
be constant over what is summed inside a tensor core:

    Y  = X W^T      contracts over inputs    X 1x128       W 128x128
    dX = dY W       contracts over outputs   dY 1x128      W 128x128, the same values and scales,
                                                           read the other way
    dW = dY^T X     contracts over tokens    dY 128x1      X 128x1

Square blocks are what lets dX use the forward's own W. X is kept for the backward in its quantized
form, half the bytes of bfloat16, and grouped anew along tokens from there, so it is rounded twice
for dW and for nothing else. Between operators gradients travel in the compute dtype; dW is
accumulated and returned in float32. This is the flow of Jet-RL (arXiv 2601.14243) and DeepSeek-V3
(arXiv 2412.19437, section 3.3). A dimension that is no multiple of 128 has a shorter last block.

Quantization itself has the derivative of the identity (the straight-through estimator, arXiv
1308.3432).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.precision.qtensor import (
    QTensor,
    dequantize,
    dequantize_rows,
    quantize,
    quantize_both_ways,
    quantize_weight,
    regroup,
)
from pallas_kernels import blockwise_matmul, grouped_matmul, grouped_outer_product
from pallas_kernels.backend import Backend
from pallas_kernels.exact import dot as exact_dot
from pallas_kernels.exact import grouped_dot as exact_grouped_dot
from pallas_kernels.grouped_matmul import align_groups, outer_product
from pallas_kernels.grouped_matmul import dot as grouped_dot
from pallas_kernels.rounding import rounded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainedWeight:
    """A weight that is multiplied in FP8 and has a gradient.

    Attributes:
        quantized: what the products multiply, [..., out, in]; no gradient flows into it.
        master: the float32 weight that receives the gradient; its values are not read. None: the
            weight is frozen, X is not kept and dW not computed.
        activation: format of X.
        output_gradient: format of dY; "compute" leaves dY as it is, and both products of the
            backward are in float32.
        saved_activation: "compute" keeps X itself for the backward, any other its quantized form.
        exact: the forward's product is exact (pallas_kernels.exact); those of the backward are not.
    """

    quantized: QTensor
    master: Array | None
    activation: TensorFormat = field(metadata={"static": True})
    output_gradient: TensorFormat = field(metadata={"static": True})
    saved_activation: TensorFormat = field(metadata={"static": True})
    exact: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.quantized.shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainedInput:
    """The input of a TrainedWeight: `quantized` is multiplied, `x` receives the gradient and is
    read only where it is saved."""

    quantized: QTensor
    x: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape


def trained_weight(
    master: Float[Array, "*stack n k"], recipe: Recipe, backend: Backend = "auto"
) -> TrainedWeight:
    """The trainer's form of a float32 master under `recipe`: the very QTensor that the rollout
    serves, and the gradient's way."""
    return replace(frozen_weight(master, recipe, backend), master=master)


def frozen_weight(
    weight: Float[Array, "*stack n k"] | QTensor, recipe: Recipe, backend: Backend = "auto"
) -> TrainedWeight:
    """`trained_weight` of a base that adapters leave as it is; one that is quantized already stays
    so."""
    if not isinstance(weight, QTensor):
        weight = quantize_weight(jax.lax.stop_gradient(weight), recipe.trainer.weight, backend)
    return TrainedWeight(
        weight,
        None,
        recipe.trainer.activation,
        recipe.output_gradient,
        recipe.saved_activation,
        recipe.exact,
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def trained_linear(
    x: TrainedInput, weight: TrainedWeight, out_dtype: jnp.dtype, backend: Backend
) -> Float[Array, "*batch n"]:
    """X W^T of the quantized operands; its gradients are dX in X's dtype and dW in float32, by the
    table above.

    Args:
        x: [..., k].
        weight: [n, k].
        out_dtype: dtype of the result.
        backend: kernels.
    """
    q, w = x.quantized, weight.quantized
    if weight.exact:
        return exact_dot(dequantize_rows(q), dequantize(w), out_dtype)
    return blockwise_matmul(
        q.values, q.scales, w.values, w.scales, w.block, out_dtype, backend=backend
    )


def _linear_forward(x, weight, out_dtype, backend):
    return trained_linear(x, weight, out_dtype, backend), (*_saved(x, weight), _constant(weight))


def _linear_backward(out_dtype, backend, residuals, dy):
    saved, like, weight = residuals
    rows, w, fmt = (
        dy.reshape(-1, dy.shape[-1]),
        _transposed(weight.quantized),
        weight.output_gradient,
    )
    frozen, dw = saved is None, None
    if fmt.quantized:
        dyq, left = (
            (quantize(rows, fmt, backend), None)
            if frozen
            else quantize_both_ways(rows, fmt, backend)
        )
        dx = blockwise_matmul(
            dyq.values, dyq.scales, w.values, w.scales, w.block, like.dtype, backend=backend
        )
        if not frozen:
            right = _input_along_tokens(saved, weight.activation, backend)
            dw = blockwise_matmul(
                left.values.T,
                left.scales.T,
                right.values.T,
                right.scales.T,
                right.block[::-1],
                jnp.float32,
                backend=backend,
            )
    else:
        dx = _wide(rows) @ _wide(dequantize(w)).T
        dw = None if frozen else _wide(rows).T @ _wide(_rows(saved))
    dx = rounded(dx, like.dtype).reshape(*dy.shape[:-1], w.shape[0])
    return TrainedInput(None, dx), replace(weight, quantized=None, master=dw)


trained_linear.defvjp(_linear_forward, _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def trained_grouped_linear(
    x: TrainedInput,
    weight: TrainedWeight,
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Float[Array, "m n"]:
    """`trained_linear` of rows sorted by group, each with its group's part of `weight` [groups, n,
    k].

    Along tokens a block never reaches into the next group: each group's rows begin a block of their
    own.
    """
    q, w = x.quantized, weight.quantized
    if weight.exact:
        return exact_grouped_dot(dequantize_rows(q), dequantize(w), group_sizes, out_dtype)
    return grouped_matmul(
        q.values, q.scales, w.values, w.scales, group_sizes, w.block, out_dtype, backend=backend
    )


def _grouped_forward(x, weight, group_sizes, out_dtype, backend):
    out = trained_grouped_linear(x, weight, group_sizes, out_dtype, backend)
    return out, (*_saved(x, weight), _constant(weight), group_sizes)


def _grouped_backward(out_dtype, backend, residuals, dy):
    saved, like, weight, sizes = residuals
    w, fmt = _transposed(weight.quantized), weight.output_gradient
    if fmt.quantized:
        dyq = quantize(dy, fmt, backend)
        dx = grouped_matmul(
            dyq.values, dyq.scales, w.values, w.scales, sizes, w.block, like.dtype, backend=backend
        )
    else:
        dx = grouped_dot(_wide(dy), dequantize(w), sizes)
    dw = (
        None
        if saved is None
        else _grouped_weight_gradient(dy, _rows(saved), sizes, weight, backend)
    )
    return (
        TrainedInput(None, rounded(dx, like.dtype)),
        replace(weight, quantized=None, master=dw),
        None,
    )


def _grouped_weight_gradient(dy, tokens, sizes, weight, backend):
    fmt = weight.output_gradient
    if not fmt.quantized:
        return outer_product(_wide(dy), _wide(tokens), sizes)
    (dy, tokens), aligned = align_groups((dy, tokens), sizes, fmt.block[1])
    left, right = _along_tokens(dy, fmt, backend), _along_tokens(tokens, weight.activation, backend)
    return grouped_outer_product(
        left.values,
        left.scales,
        right.values,
        right.scales,
        aligned,
        left.block[0],
        backend=backend,
    )


trained_grouped_linear.defvjp(_grouped_forward, _grouped_backward)


def _saved(x: TrainedInput, weight: TrainedWeight) -> tuple[QTensor | Array | None, Array]:
    """What dW needs of X, nothing where the weight is frozen; and an empty array of X's dtype."""
    kept = x.quantized if weight.saved_activation.quantized else x.x
    return None if weight.master is None else kept, jnp.zeros(0, x.x.dtype)


def _constant(weight: TrainedWeight) -> TrainedWeight:
    """Without the master, which would be kept alive for nothing."""
    return replace(weight, master=None)


def _transposed(w: QTensor) -> QTensor:
    return QTensor(jnp.swapaxes(w.values, -1, -2), jnp.swapaxes(w.scales, -1, -2), w.block[::-1])


def _rows(x: QTensor | Array) -> Array:
    """X as a matrix [tokens, k], dequantized."""
    if not isinstance(x, QTensor):
        return x.reshape(-1, x.shape[-1])
    return dequantize_rows(x).reshape(-1, x.shape[-1])


def _input_along_tokens(saved: QTensor | Array, fmt: TensorFormat, backend: Backend) -> QTensor:
    """What was kept of X, as the weight's gradient multiplies it."""
    return (
        regroup(saved, fmt, backend)
        if isinstance(saved, QTensor)
        else _along_tokens(_rows(saved), fmt, backend)
    )


def _along_tokens(x: Array, fmt: TensorFormat, backend: Backend) -> QTensor:
    return quantize(x, replace(fmt, block=fmt.block[::-1]), backend)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)

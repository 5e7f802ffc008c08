"""The precision-aware linear: quantization is a type of the weight, not a mode of the layer.

Each type knows how to prepare its input and how to multiply it; a layer asks nothing else.

    PlainWeight           an array in the compute dtype
    QuantizedWeight       a QTensor with the formats of its products: W8A8, and FP8 gradients where
                          it has a master; what the trainer and the rollout both multiply
    PredequantizedWeight  one whose values a decode loop keeps dequantized, on a backend that would
                          otherwise dequantize them at every token
    AdaptedWeight         any of these, frozen, with a low-rank adapter beside it

In block FP8 the forward is X in 1x128 groups times W in 128x128 blocks. The backward has two
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

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import COMPUTE, TensorFormat
from fp8rl_jax.config.recipe import LinearPrecision
from fp8rl_jax.precision.compute import Compute
from fp8rl_jax.precision.formats import format_of
from fp8rl_jax.precision.quantizer import (
    dequantize_rows,
    quantize,
    quantize_along_rows,
    quantize_both_ways,
    regroup,
    round_through,
)
from pallas_kernels import QTensor, blockwise_matmul, grouped_outer_product
from pallas_kernels.backend import Backend
from pallas_kernels.exact import Integers
from pallas_kernels.grouped_matmul import align_groups, outer_product
from pallas_kernels.grouped_matmul import dot as grouped_dot
from pallas_kernels.matmul import Panels, selected_backend
from pallas_kernels.rounding import rounded

Sizes = Int[Array, " groups"] | None
"""Rows of each group, where rows are sorted by group and each has its group's part of the weight;
rows behind the last group give zero. None: the weight is one matrix."""


class LinearWeight(Protocol):
    """A weight [..., out, in], or [groups, out, in] for the experts of a mixture."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def prepare(self, x: Float[Array, "*m k"], compute: Compute) -> Any:
        """Bring an input into the form that `multiply` takes; weights of one kind share it."""
        ...

    def multiply(
        self, x: Any, out_dtype: jnp.dtype, compute: Compute, group_sizes: Sizes = None
    ) -> Float[Array, "*m n"]:
        """Multiply a prepared input by the weight's transpose, accumulated in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainWeight:
    """An array in the compute dtype, or a form of it that a loop multiplies (`predequantize`)."""

    values: Array | Integers | Panels

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def prepare(self, x, compute):
        return x

    def multiply(self, x, out_dtype, compute, group_sizes=None):
        return _unquantized_product(x, self.values, out_dtype, compute, group_sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedInput:
    """The input of a QuantizedWeight: `quantized` is multiplied, `x` receives the gradient.

    `dequantized`, float32, is what the reference multiplies: the values of `quantized`, rounded
    without a cast to 8 bits. None where kernels multiply.
    """

    quantized: QTensor
    x: Array
    dequantized: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight, and how it is multiplied.

    Attributes:
        quantized: what the products multiply, [..., out, in]; no gradient flows into it.
        master: the float32 weight that receives the gradient; its values are not read. None: the
            weight is frozen, X is not kept and dW not computed.
        precision: its products' formats. An activation in "compute" leaves X as it is and
            dequantizes the weight (weight-only quantization); an output gradient in "compute"
            leaves dY as it is, and both products of the backward are in float32; a saved activation
            in "compute" keeps X itself for the backward, any other its quantized form.
    """

    quantized: QTensor
    master: Array | None = None
    precision: LinearPrecision = field(default=LinearPrecision(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.quantized.shape

    def prepare(self, x, compute):
        return _quantized_input(x, self.precision.activation, compute)

    def multiply(self, x, out_dtype, compute, group_sizes=None):
        if isinstance(x, QuantizedInput):
            return _quantized_linear(x, self, group_sizes, out_dtype, compute)

        # the backward dequantizes again: it would keep a float32 copy of a frozen FP8 model
        @partial(jax.checkpoint, prevent_cse=False)
        def product(x, w):
            wide = w.dequantize()
            return compute.product(x.astype(jnp.float32), wide, group_sizes, out_dtype)

        return rounded(product(x, self.quantized), out_dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PredequantizedWeight:
    """The dequantized values of a QTensor, float32 [..., out, in], or another form of them.

    Attributes:
        values: what a product without kernels for FP8 multiplies.
        activation: format of X, as a QuantizedWeight has it.
    """

    values: Array | Integers | Panels
    activation: TensorFormat = field(default=COMPUTE, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def prepare(self, x, compute):
        return _quantized_input(x, self.activation, compute)

    def multiply(self, x, out_dtype, compute, group_sizes=None):
        x = x.dequantized if isinstance(x, QuantizedInput) else x
        return _unquantized_product(x, self.values, out_dtype, compute, group_sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedInput:
    """An input in both its forms: `base` as the base has prepared it, `plain` for the adapter."""

    plain: Array
    base: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight:
    """base + scale * b a, never added up (LoRA, arXiv 2106.09685).

    Attributes:
        base: [..., out, in], an array or any other type of weight that is frozen.
        a: [..., rank, in].
        b: [..., out, rank], of a's dtype.
        scale: alpha / rank, or alpha / sqrt(rank) (rsLoRA).
    """

    base: Array | Integers | Panels | QTensor | QuantizedWeight | PredequantizedWeight
    a: Array
    b: Array
    scale: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def prepare(self, x, compute):
        return AdaptedInput(x, as_weight(self.base).prepare(x, compute))

    def multiply(self, x, out_dtype, compute, group_sizes=None):
        # the adapter in its own dtype, on the input as it was before quantization
        dtype = self.a.dtype
        inner = rounded(compute.product(rounded(x.plain, dtype), self.a, group_sizes), dtype)
        base = as_weight(self.base).multiply(x.base, jnp.float32, compute, group_sizes)
        low_rank = compute.product(inner, self.b, group_sizes)
        return rounded(compute.add_scaled(base, low_rank, self.scale), out_dtype)


Stored = (
    Array | Integers | Panels | QTensor | QuantizedWeight | PredequantizedWeight | AdaptedWeight
)
"""What a policy's containers hold."""


def as_weight(stored: Stored) -> LinearWeight:
    """Give what a policy's container holds its type; a bare QTensor is multiplied weight-only."""
    if isinstance(stored, QTensor):
        return QuantizedWeight(stored)
    if isinstance(stored, QuantizedWeight | PredequantizedWeight | AdaptedWeight | PlainWeight):
        return stored
    return PlainWeight(stored)


def is_quantized(x: Any) -> bool:
    """Tell whether `x` is a quantized form of a weight; an `is_leaf` of jax.tree functions, too."""
    return isinstance(x, QTensor | QuantizedWeight | PredequantizedWeight)


def linear(
    x: Float[Array, "*m k"],
    weight: Stored,
    out_dtype: jnp.dtype,
    compute: Compute | None = None,
    group_sizes: Sizes = None,
) -> Float[Array, "*m n"]:
    """Multiply `x` by the transpose of a weight, as its type does it, accumulated in float32.

    Args:
        x: any float dtype; where `group_sizes` is given, [m, k] sorted by group.
        weight: [n, k], or [groups, n, k].
        out_dtype: dtype of the result.
        compute: kernels and arithmetic; default: the best kernels of the device.
        group_sizes: rows of each group.
    """
    compute, operand = compute or Compute(), as_weight(weight)
    return operand.multiply(operand.prepare(x, compute), out_dtype, compute, group_sizes)


def predequantize(weight: Stored, compute: Compute) -> Stored:
    """Move the work that does not depend on the input out of a decode loop.

    A quantized weight is dequantized where no kernel multiplies it as it is. On a CPU with kernels
    a float32 weight is brought into panels, in exact mode without them into the integers of its
    products. One that is predequantized already stays so.
    """
    if isinstance(weight, PredequantizedWeight):
        return weight
    if isinstance(weight, AdaptedWeight):
        return replace(weight, base=predequantize(weight.base, compute))
    if isinstance(weight, QTensor):
        weight = QuantizedWeight(weight)
    if isinstance(weight, QuantizedWeight):
        values = compute.prepared(weight.quantized)
        return (
            weight if values is None else PredequantizedWeight(values, weight.precision.activation)
        )
    if isinstance(weight, Panels):
        return weight
    values = compute.prepared(weight)
    return weight if values is None else values


def _unquantized_product(x, values, out_dtype, compute: Compute, group_sizes: Sizes) -> Array:
    x = x.astype(values.dtype) if isinstance(values, Array) else x
    return rounded(compute.product(x, values, group_sizes, out_dtype), out_dtype)


def _quantized_input(x: Array, fmt: TensorFormat, compute: Compute) -> QuantizedInput | Array:
    """The input of a quantized weight, `x` itself where the format quantizes nothing."""
    if not fmt.quantized:
        return x
    flat, dequantized = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1]), None
    rows = quantize(flat, fmt, compute.backend)
    if selected_backend(compute.backend) == "reference":
        dequantized = round_through(flat, fmt, compute.backend).reshape(x.shape)
    return QuantizedInput(_with_axes(rows, x.shape[:-1]), x, dequantized)


def _with_axes(rows: QTensor, axes: tuple[int, ...]) -> QTensor:
    """Rows with these axes in place of their one."""
    return jax.tree.map(lambda z: z.reshape(*axes, z.shape[-1]), rows)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _quantized_linear(
    x: QuantizedInput,
    weight: QuantizedWeight,
    group_sizes: Sizes,
    out_dtype: jnp.dtype,
    compute: Compute,
) -> Float[Array, "*m n"]:
    """X W^T of the quantized operands; gradients are dX in X's dtype and dW in float32.

    Along tokens a block never reaches into the next group: each group's rows begin a block of their
    own.
    """
    return compute.quantized_product(x.quantized, weight.quantized, group_sizes, out_dtype)


def _forward(x, weight, group_sizes, out_dtype, compute):
    out = _quantized_linear(x, weight, group_sizes, out_dtype, compute)
    return out, (*_saved(x, weight), _constant(weight), group_sizes)


def _backward(out_dtype, compute, residuals, dy):
    saved, like, weight, sizes = residuals
    backend, fmt = compute.backend, weight.precision.output_gradient
    rows, w, dw = dy.reshape(-1, dy.shape[-1]), weight.quantized.T, None
    tokens = len(rows)
    if fmt.quantized and saved is not None and sizes is None:
        activation = weight.precision.activation
        more = -tokens % math.lcm(*(format_of(x, rows.shape).packed for x in (fmt, activation)))
        # one read of dY for both of its products
        dyq, left = quantize_both_ways(_more_rows(rows, more), fmt, backend)
        right = _input_along_tokens(saved, more, activation, backend)
        dw = blockwise_matmul(left.T, right.T, jnp.float32, backend=backend)
    else:
        dyq = quantize(rows, fmt, backend) if fmt.quantized else None
        if saved is not None:
            dw = _weight_gradient(rows, _rows(saved), sizes, weight.precision, backend)
    if dyq is not None:
        dx = Compute(backend).quantized_product(dyq, w, sizes, like.dtype)[:tokens]
    elif sizes is None:
        dx = _float32(rows) @ w.dequantize().T
    else:
        dx = grouped_dot(_float32(rows), w.dequantize(), sizes)
    dx = rounded(dx, like.dtype).reshape(*dy.shape[:-1], w.shape[-2])
    return *_cotangents(dx, dw, weight), None


_quantized_linear.defvjp(_forward, _backward)


def _weight_gradient(dy, tokens, sizes, precision: LinearPrecision, backend):
    """dY^T X of each group, or of all rows in float32."""
    fmt = precision.output_gradient
    if sizes is None:
        return _float32(dy).T @ _float32(tokens)
    if not fmt.quantized:
        return outer_product(_float32(dy), _float32(tokens), sizes)
    assert fmt.block is not None
    (dy, tokens), aligned = align_groups((dy, tokens), sizes, fmt.block[1])
    left = quantize_along_rows(dy, fmt, backend)
    right = quantize_along_rows(tokens, precision.activation, backend)
    return grouped_outer_product(left, right, aligned, backend=backend)


def _saved(x: QuantizedInput, weight: QuantizedWeight) -> tuple[QTensor | Array | None, Array]:
    """What dW needs of X, nothing where the weight is frozen; and an empty array of X's dtype."""
    kept = x.quantized if weight.precision.saved_activation.quantized else x.x
    return None if weight.master is None else kept, jnp.zeros(0, x.x.dtype)


def _constant(weight: QuantizedWeight) -> QuantizedWeight:
    """Without the master, which would be kept alive for nothing."""
    return replace(weight, master=None)


def _cotangents(
    dx: Array, dw: Array | None, weight: QuantizedWeight
) -> tuple[QuantizedInput, QuantizedWeight]:
    none: Any = None  # the cotangent of what has no gradient
    return QuantizedInput(none, dx, none), replace(weight, quantized=none, master=dw)


def _rows(x: QTensor | Array) -> Array:
    """X as a matrix [tokens, k], dequantized."""
    if not isinstance(x, QTensor):
        return x.reshape(-1, x.shape[-1])
    return dequantize_rows(x).reshape(-1, x.shape[-1])


def _input_along_tokens(
    saved: QTensor | Array, more: int, fmt: TensorFormat, backend: Backend
) -> QTensor:
    """What was kept of X, and so many rows of zeros, as the weight's gradient multiplies it."""
    if isinstance(saved, QTensor) and not more:
        return regroup(saved, fmt, backend)
    return quantize_along_rows(_more_rows(_rows(saved), more), fmt, backend)


def _more_rows(x: Array, more: int) -> Array:
    """Rows of zeros behind those of x: a format that packs numbers takes a multiple of them."""
    return jnp.pad(x, ((0, more), (0, 0))) if more else x


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)

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

Square blocks are what lets dX use the forward's own W; a format without them (MX, NVFP4 in groups
of a row) has a second quantization of W, along its outputs, from the same source. X is kept for the
backward in its quantized form, half the bytes of bfloat16 or less. That of block FP8 is grouped
anew along tokens from there, so it is rounded twice for dW and for nothing else; that of other
formats is quantized along tokens in the forward, from X itself, and rounded once. A recipe may draw
the roundings of dY (`gradient_rounding`), and spread outliers of both operands of dW over 16 tokens
before they are quantized (`gradient_transform`, precision/hadamard.py). Between operators gradients
travel in the compute dtype; dW is accumulated and returned in float32. This is the flow of Jet-RL
(arXiv 2601.14243) and DeepSeek-V3 (arXiv 2412.19437, section 3.3). A dimension that is no multiple
of 128 has a shorter last block. Quantization itself has the derivative of the identity (the
straight-through estimator, arXiv 1308.3432), that of a weight in e2m1 another one on request
(precision/estimator.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import COMPUTE, WHOLE, TensorFormat
from fp8rl_jax.config.recipe import LinearPrecision
from fp8rl_jax.precision.compute import Compute
from fp8rl_jax.precision.estimator import with_estimated_gradient
from fp8rl_jax.precision.formats import format_of
from fp8rl_jax.precision.hadamard import HADAMARD, hadamard
from fp8rl_jax.precision.quantizer import (
    along_rows,
    quantize,
    quantize_along_rows,
    quantize_both_ways,
    regroup,
    round_through,
    stochastic_salt,
)
from pallas_kernels import Format, QTensor, blockwise_outer_product, grouped_outer_product
from pallas_kernels.backend import Backend
from pallas_kernels.exact import Integers
from pallas_kernels.grouped_matmul import align_groups, outer_product
from pallas_kernels.grouped_matmul import dot as grouped_dot
from pallas_kernels.matmul import Panels, selected_backend
from pallas_kernels.qtensor import from_bits, to_bits
from pallas_kernels.quantize import dequantize
from pallas_kernels.rounding import full_precision, rounded

Sizes = Int[Array, " groups"] | None
"""Rows of each group, where rows are sorted by group and each has its group's part of the weight;
rows behind the last group give zero. None: the weight is one matrix."""


class LinearWeight(Protocol):
    """A weight [..., out, in], or [groups, out, in] for the experts of a mixture."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def activation(self) -> TensorFormat:
        """Format of the input; COMPUTE: it stays as it is."""
        ...

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

    @property
    def activation(self) -> TensorFormat:
        return COMPUTE

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
            dequantizes the weight (weight-only quantization, whose gradient goes to the master as
            if nothing were quantized); an output gradient in "compute" leaves dY as it is, and both
            products of the backward are in float32; a saved activation in "compute" keeps X itself
            for the backward, any other its quantized form.
        turned: the weight quantized along its outputs, for dX. None: dX reads `quantized`, or dY is
            not quantized.
    """

    quantized: QTensor
    master: Array | None = None
    precision: LinearPrecision = field(default=LinearPrecision(), metadata={"static": True})
    turned: QTensor | None = None

    @classmethod
    def of(
        cls,
        weight: Float[Array, "*stack n k"] | QTensor,
        master: Array | None,
        precision: LinearPrecision,
        backend: Backend = "auto",
    ) -> QuantizedWeight:
        """Quantize a weight for all products that the trainer has with it; one that is quantized
        already stays as it is."""
        source = weight if isinstance(weight, QTensor) else jax.lax.stop_gradient(weight)
        quantized = (
            source if isinstance(source, QTensor) else quantize(source, precision.weight, backend)
        )
        if master is not None and precision.weight_gradient_estimator == "differentiable":
            master = with_estimated_gradient(master, quantized)
        turned, whole = None, precision.weight.block is None
        if precision.output_gradient.quantized and not (whole or quantized.format.square):
            values = source.dequantize() if isinstance(source, QTensor) else source
            turned = quantize_along_rows(values, precision.weight, backend)
        return cls(quantized, master, precision, turned)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.quantized.shape

    @property
    def activation(self) -> TensorFormat:
        return self.precision.activation

    def prepare(self, x, compute):
        return _quantized_input(x, self.activation, compute)

    def multiply(self, x, out_dtype, compute, group_sizes=None):
        if isinstance(x, QuantizedInput):
            return _quantized_linear(x, self, group_sizes, out_dtype, compute)

        # the backward dequantizes again: it would keep a float32 copy of a frozen FP8 model
        @partial(jax.checkpoint, prevent_cse=False)
        def product(x, w, master):
            wide = dequantize(from_bits(w), backend=compute.backend)
            if master is not None:
                wide = _in_place_of(master, wide)
            return compute.product(x.astype(jnp.float32), wide, group_sizes, out_dtype)

        return rounded(product(x, self.quantized, self.master), out_dtype)


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

    @property
    def activation(self) -> TensorFormat:
        return as_weight(self.base).activation

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


def input_splits(stored: Stored, parts: int) -> bool:
    """Tell whether an input may be prepared, and kept for the backward, in so many equal parts of
    its columns: to the bits that the whole has."""
    weight = _base(stored)
    formats = [weight.activation]
    if isinstance(weight, QuantizedWeight):
        formats.append(weight.precision.saved_activation)
    return all(_columns_split(fmt, weight.shape[-1], parts) for fmt in formats)


def output_splits(stored: Stored, parts: int) -> bool:
    """Tell whether a gradient of the outputs may be quantized in so many equal parts of its
    columns, to the bits that the whole has."""
    weight = _base(stored)
    if not isinstance(weight, QuantizedWeight):
        return True
    return _columns_split(weight.precision.output_gradient, weight.shape[-2], parts)


def _base(stored: Stored) -> LinearWeight:
    return as_weight(stored.base if isinstance(stored, AdaptedWeight) else stored)


def _columns_split(fmt: TensorFormat, columns: int, parts: int) -> bool:
    if not fmt.quantized or parts == 1:
        return True
    made = format_of(fmt, (1, columns))
    return made.by_block and made.by_row and columns // parts % made.block[1] == 0


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


def multiply_all(
    x: Any,
    weights: Sequence[LinearWeight],
    out_dtype: jnp.dtype,
    compute: Compute,
    shards: int = 1,
) -> list[Float[Array, "*m n"]]:
    """Multiply one input, prepared by any of them, by weights of one kind: as each of them would,
    and in one kernel where Hopper has one for all.

    Args:
        shards: devices over which the outputs of each are split, where they are to be multiplied as
            one weight (`Compute.joins`).
    """
    if len(weights) > 1 and (one := _as_one(weights, shards)) is not None:
        product = one.multiply(x, out_dtype, compute)
        return _apart(product, [w.shape[0] for w in weights], shards)
    quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
    if (
        isinstance(x, QuantizedInput)
        and 1 < len(weights) == len(quantized)
        and selected_backend(compute.backend) == "hopper"
        and not compute.exact
    ):
        return _quantized_linears(x, quantized, out_dtype, compute)
    return [weight.multiply(x, out_dtype, compute) for weight in weights]


def _as_one(weights: Sequence[LinearWeight], shards: int) -> LinearWeight | None:
    """One weight of several, whose part of each device is that device's part of each of them; None
    where a part is no whole number of blocks, or another copy of a weight would have to follow."""

    def join(*arrays: Array) -> Array:
        split = [x.reshape(shards, -1, *x.shape[1:]) for x in arrays]
        return jnp.concatenate(split, axis=1).reshape(-1, *arrays[0].shape[1:])

    def fits(weight: LinearWeight) -> bool:
        n = weight.shape[0]
        if isinstance(weight, PlainWeight):
            return isinstance(weight.values, Array) and weight.values.ndim == 2 and n % shards == 0
        if not isinstance(weight, QuantizedWeight) or weight.turned is not None:
            return False
        side = weight.quantized.format.block[0]
        sides = {x.shape[0] for x in jax.tree.leaves(weight.quantized)}
        return n % (shards * side) == 0 and sides <= {n, n // side}

    if shards == 1 or not all(map(fits, weights)):
        return None
    return jax.tree.map(join, *weights)


def _apart(product: Array, sizes: Sequence[int], shards: int) -> list[Array]:
    """The product of each of the weights of `_as_one`, from that of all."""
    lead, ends = product.shape[:-1], [*accumulate(size // shards for size in sizes)]
    by_part = jnp.split(product.reshape(*lead, shards, -1), ends[:-1], axis=-1)
    return [x.reshape(*lead, -1) for x in by_part]


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
        return weight if values is None else PredequantizedWeight(values, weight.activation)
    if isinstance(weight, Panels):
        return weight
    values = compute.prepared(weight)
    return weight if values is None else values


def _unquantized_product(x, values, out_dtype, compute: Compute, group_sizes: Sizes) -> Array:
    x = x.astype(values.dtype) if isinstance(values, Array) else x
    if compute.joins and group_sizes is None and x.dtype == out_dtype:
        return _summed_product(x, values)
    return rounded(compute.product(x, values, group_sizes, out_dtype), out_dtype)


@jax.custom_vjp
def _summed_product(x: Float[Array, "*m k"], w: Float[Array, "n k"]) -> Float[Array, "*m n"]:
    """x w^T in x's dtype; in that, too, parts of it and of dX are added over devices. dW is float32
    as long as it is added."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, full_precision(x), x.dtype)


def _summed_backward(operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    (x, w), tokens = operands, tuple(range(dy.ndim - 1))
    contract, precision = (((dy.ndim - 1,), (0,)), ((), ())), full_precision(x)
    dx = jax.lax.dot_general(dy, w, contract, precision, x.dtype)
    dw = jax.lax.dot_general(dy, x, ((tokens, tokens), ((), ())), precision, jnp.float32)
    return dx, rounded(dw, w.dtype)


_summed_product.defvjp(lambda x, w: (_summed_product(x, w), (x, w)), _summed_backward)


def _quantized_input(x: Array, fmt: TensorFormat, compute: Compute) -> QuantizedInput | Array:
    """The input of a quantized weight, `x` itself where the format quantizes nothing."""
    if not fmt.quantized:
        return x
    flat, dequantized = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1]), None
    rows = to_bits(quantize(flat, fmt, compute.backend))
    if selected_backend(compute.backend) == "reference":
        dequantized = round_through(flat, fmt, compute.backend).reshape(x.shape)
    # rows that share a scale stay one matrix
    return QuantizedInput(
        _with_axes(rows, x.shape[:-1]) if rows.format.by_row else rows, x, dequantized
    )


def _with_axes(rows: QTensor, axes: tuple[int, ...]) -> QTensor:
    """Rows with these axes in place of their one."""
    return jax.tree.map(lambda z: z.reshape(*axes, z.shape[-1]), rows)


@jax.custom_vjp
def _in_place_of(master: Array, values: Array) -> Array:
    """The values, with the derivative of the master (the straight-through estimator)."""
    return values


_in_place_of.defvjp(
    lambda master, values: (values, jnp.zeros(0, master.dtype)),
    lambda like, gradient: (gradient.astype(like.dtype), jnp.zeros_like(gradient)),
)


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
    operands = from_bits((x.quantized, weight.quantized))
    out = compute.quantized_product(*operands, group_sizes, out_dtype)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _forward(x, weight, group_sizes, out_dtype, compute):
    out = _quantized_linear(x, weight, group_sizes, out_dtype, compute)
    return out, _residuals(x, weight, group_sizes, compute)


def _residuals(x, weight, group_sizes, compute):
    """What the backward keeps."""
    saved = _saved(x, weight, group_sizes, compute.backend)
    return saved, jnp.zeros(0, x.x.dtype), _constant(weight), group_sizes


def _backward(out_dtype, compute, residuals, dy):
    saved, like, weight, sizes = from_bits(residuals)
    precision, backend = weight.precision, compute.backend
    fmt, rows = precision.output_gradient, dy.reshape(-1, dy.shape[-1])
    w, dw = weight.quantized if weight.turned is None else weight.turned, None
    if not fmt.quantized:
        dx = _times(_float32(rows), dequantize(w, backend=backend), sizes, like.dtype)
        if saved is not None:
            dw = _outer_product(_float32(rows), _float32(_rows(saved)), sizes, like.dtype)
    else:
        dyq, along = _gradient_operands(rows, precision, sizes, saved is not None, backend)
        inexact = Compute(backend, joins=compute.joins)
        dx = inexact.input_gradient(dyq, w, sizes, like.dtype)[: len(rows)]
        if along is not None:
            dy_along, aligned = along
            x_along = saved
            if not _saves_along_tokens(precision):
                x_along = _input_along_tokens(_rows_of(saved), precision, sizes, backend)
            if aligned is None:
                dw = blockwise_outer_product(dy_along, x_along, backend=backend)
            else:
                dw = grouped_outer_product(dy_along, x_along, aligned, backend=backend)
    dx = rounded(dx, like.dtype).reshape(*dy.shape[:-1], w.shape[-1])
    return *_cotangents(dx, dw, weight), None


_quantized_linear.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _quantized_linears(
    x: QuantizedInput, weights: list[QuantizedWeight], out_dtype: jnp.dtype, compute: Compute
) -> list[Float[Array, "*m n"]]:
    """`_quantized_linear` of each weight."""
    rows, operands = from_bits((x.quantized, [w.quantized for w in weights]))
    products = compute.quantized_products(rows, operands, out_dtype)
    return [out.reshape(*x.shape[:-1], out.shape[-1]) for out in products]


def _forward_all(x, weights, out_dtype, compute):
    residuals = [_residuals(x, weight, None, compute) for weight in weights]
    return _quantized_linears(x, weights, out_dtype, compute), residuals


def _backward_all(out_dtype, compute, residuals, dys):
    each = [
        _backward(out_dtype, compute, kept, dy) for kept, dy in zip(residuals, dys, strict=True)
    ]
    dx, dweights, _ = zip(*each, strict=True)
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *dx), list(dweights)


_quantized_linears.defvjp(_forward_all, _backward_all)


def _gradient_operands(
    dy: Array, precision: LinearPrecision, sizes: Sizes, trained: bool, backend: Backend
) -> tuple[QTensor, tuple[QTensor, Sizes] | None]:
    """dY along outputs, for dX; and along tokens, for dW, with the rows of each group, where the
    weight is trained."""
    fmt = precision.output_gradient
    more = _missing_rows(len(dy), precision)
    plain = precision.gradient_rounding == "nearest" and precision.gradient_transform == "none"
    if trained and plain and sizes is None:
        # one read of dY for both of its products
        along_outputs, along_tokens = quantize_both_ways(_more_rows(dy, more), fmt, backend)
        return along_outputs, (along_tokens, None)

    def quantized(x: Array, made: Format, use: int) -> QTensor:
        if precision.gradient_rounding == "nearest":
            return made.quantize(x, backend)
        return made.quantize_stochastic(x, stochastic_salt(x) + jnp.uint32(use))

    along_outputs = quantized(dy, format_of(fmt, dy.shape), 0)
    if not trained:
        return along_outputs, None
    laid_out, aligned = _along_tokens(dy, precision, sizes)
    return along_outputs, (quantized(laid_out, along_rows(fmt, laid_out.shape), 1), aligned)


def _saved(
    x: QuantizedInput, weight: QuantizedWeight, sizes: Sizes, backend: Backend
) -> QTensor | Array | None:
    """What dW needs of X, nothing where the weight is frozen."""
    precision = weight.precision
    if weight.master is None:
        return None
    if _saves_along_tokens(precision):
        rows = x.x.reshape(-1, x.shape[-1])
        return to_bits(_input_along_tokens(rows, precision, sizes, backend))
    return x.quantized if precision.saved_activation.quantized else x.x


def _saves_along_tokens(precision: LinearPrecision) -> bool:
    """Whether X is kept as dW multiplies it, quantized from the source."""
    kept = precision.saved_activation
    # one row says what format it is: that of a whole tensor is one of element types
    return (
        kept.quantized
        and precision.output_gradient.quantized
        and not format_of(kept, (1, 1)).regrouped
    )


def _input_along_tokens(
    x: QTensor | Array, precision: LinearPrecision, sizes: Sizes, backend: Backend
) -> QTensor:
    """X as the weight's gradient multiplies it."""
    fmt = precision.activation
    whole = sizes is None and precision.gradient_transform == "none"
    if isinstance(x, QTensor):
        if whole and not _missing_rows(x.shape[-2], precision):
            return regroup(x, fmt, backend)
        x = dequantize(x, backend=backend)
    return quantize_along_rows(_along_tokens(x, precision, sizes)[0], fmt, backend)


def _along_tokens(x: Array, precision: LinearPrecision, sizes: Sizes) -> tuple[Array, Sizes]:
    """Rows of an operand of dW before they are quantized along tokens, and those of each group: a
    group begins a block of its own, and outliers are spread by the transform."""
    if sizes is None:
        x, aligned = _more_rows(x, _missing_rows(len(x), precision)), None
    else:
        # of a scale for all tokens, groups may begin anywhere
        side = (precision.output_gradient.block or (WHOLE, WHOLE))[1] or 1
        side = math.lcm(side, _row_multiple(precision))
        (x,), aligned = align_groups((x,), sizes, side)
    if precision.gradient_transform == "hadamard":
        x = hadamard(x)
    return x, aligned


def _missing_rows(tokens: int, precision: LinearPrecision) -> int:
    """How many rows of zeros a product over tokens wants behind theirs."""
    return -tokens % _row_multiple(precision)


def _row_multiple(precision: LinearPrecision) -> int:
    """What the transform, and a format that packs numbers, take a multiple of."""
    formats = (precision.output_gradient, precision.activation)
    spread = HADAMARD if precision.gradient_transform == "hadamard" else 1
    return math.lcm(spread, *(format_of(fmt, (1, 1)).packed for fmt in formats))


def _times(dy: Array, w: Array, sizes: Sizes, dtype: jnp.dtype) -> Array:
    """dY [tokens, n] times W [..., n, k], a part of a computation in `dtype`."""
    if sizes is None:
        return jnp.matmul(dy, w, precision=full_precision(dy, dtype))
    return grouped_dot(dy, w, sizes, -2, dtype)


def _outer_product(dy: Array, x: Array, sizes: Sizes, dtype: jnp.dtype) -> Array:
    """dY^T X of all rows, or of each group."""
    if sizes is None:
        return jnp.matmul(dy.T, x, precision=full_precision(dy, dtype))
    return outer_product(dy, x, sizes, dtype)


def _constant(weight: QuantizedWeight) -> QuantizedWeight:
    """Without the master, which would be kept alive for nothing."""
    return replace(weight, master=None)


def _cotangents(
    dx: Array, dw: Array | None, weight: QuantizedWeight
) -> tuple[QuantizedInput, QuantizedWeight]:
    none: Any = None  # the cotangent of what has no gradient
    return QuantizedInput(none, dx, none), replace(weight, quantized=none, master=dw, turned=none)


def _rows(x: QTensor | Array) -> Array:
    """X as a matrix [tokens, k], dequantized."""
    x = _rows_of(x)
    return x.dequantize() if isinstance(x, QTensor) else x


def _rows_of(x: QTensor | Array) -> QTensor | Array:
    """X as a matrix [tokens, k]."""
    return x.rows() if isinstance(x, QTensor) else x.reshape(-1, x.shape[-1])


def _more_rows(x: Array, more: int) -> Array:
    """Rows of zeros behind those of x: a format that packs numbers takes a multiple of them."""
    return jnp.pad(x, ((0, more), (0, 0))) if more else x


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)

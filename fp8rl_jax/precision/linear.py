"""The precision-aware linear: quantization is a type of the weight, not a mode of the layer.

`linear(x, weight)` multiplies what it is given. A plain array is multiplied in the compute dtype; a
`QTensor` is multiplied as W8A8, its input quantized on the way in; a `HoistedWeight` is a QTensor
whose dequantized values are kept by a decode loop on a backend that would otherwise unpack them at
every token; a `TrainedWeight` is a QTensor with FP8 gradients; an `AdaptedWeight` is any of the
others, frozen, with a low-rank adapter beside it. The model has no other branch. `grouped_linear`
is the same for the experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.precision.qtensor import QTensor, dequantize, dequantize_rows, quantize
from fp8rl_jax.precision.trained import (
    TrainedInput,
    TrainedWeight,
    trained_grouped_linear,
    trained_linear,
)
from pallas_kernels import blockwise_matmul, grouped_matmul
from pallas_kernels.backend import Backend
from pallas_kernels.exact import Integers, add_scaled, to_integers
from pallas_kernels.exact import dot as exact_dot
from pallas_kernels.exact import grouped_dot as exact_grouped_dot
from pallas_kernels.grouped_matmul import dot as _grouped_dot
from pallas_kernels.matmul import dot, selected_backend
from pallas_kernels.rounding import rounded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HoistedWeight:
    """Dequantized values of a QTensor, float32 [..., out, in] or their integers: what the reference
    product multiplies."""

    values: Array | Integers

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight:
    """base + scale * b a, never added up (LoRA, arXiv 2106.09685).

    Attributes:
        base: [..., out, in], an array, QTensor, HoistedWeight or a TrainedWeight that is frozen; no
            gradient is asked of it.
        a: [..., rank, in].
        b: [..., out, rank], of a's dtype.
        scale: alpha / rank, or alpha / sqrt(rank) (rsLoRA).
    """

    base: Array | QTensor | HoistedWeight | TrainedWeight
    a: Array
    b: Array
    scale: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


class AdaptedInput(NamedTuple):
    """An input in both its forms: `quantized` for the base, `plain` for the adapter."""

    plain: Array
    quantized: QTensor | TrainedInput


Weight = Array | QTensor | HoistedWeight | TrainedWeight | AdaptedWeight
Input = Array | QTensor | TrainedInput | AdaptedInput


def is_quantized(x) -> bool:
    """True for the quantized forms of a weight; also serves as `is_leaf` of jax.tree functions."""
    return isinstance(x, QTensor | HoistedWeight | TrainedWeight)


def hoist(weight: Weight, backend: Backend = "auto", exact: bool = False) -> Weight:
    """Moves the work that does not depend on the input out of a loop: dequantizes a QTensor where
    the reference will run.

    Args:
        exact: the weight will be multiplied by an exact product.
    """
    if exact and selected_backend(backend) == "reference":
        if isinstance(weight, AdaptedWeight):
            return replace(weight, base=hoist(weight.base, backend, exact))
        return (
            HoistedWeight(to_integers(dequantize(weight)))
            if isinstance(weight, QTensor)
            else to_integers(weight)
        )
    if isinstance(weight, QTensor) and selected_backend(backend) == "reference":
        return HoistedWeight(dequantize(weight))
    return weight


def quantize_input(
    x: Float[Array, "*batch k"], weight: Weight, fmt: TensorFormat, backend: Backend = "auto"
):
    """The input in the form that `weight` multiplies: layers that share an input quantize it once.

    Returns `x` itself where the weight is a plain array or the format is the compute dtype, and
    both forms of it where the weight has an adapter: that one multiplies the input as it is.
    """
    if isinstance(weight, AdaptedWeight):
        base = quantize_input(x, weight.base, fmt, backend)
        return x if base is x else AdaptedInput(x, base)
    if not is_quantized(weight) or not fmt.quantized:
        return x
    rows = quantize(jax.lax.stop_gradient(x).reshape(-1, x.shape[-1]), fmt, backend)
    groups = rows.scales.shape[-1]
    quantized = QTensor(
        rows.values.reshape(x.shape), rows.scales.reshape(*x.shape[:-1], groups), rows.block
    )
    return TrainedInput(quantized, x) if isinstance(weight, TrainedWeight) else quantized


def linear(
    x: Float[Array, "*batch k"] | QTensor | TrainedInput | AdaptedInput,
    weight: Weight,
    out_dtype: jnp.dtype,
    backend: Backend = "auto",
    exact: bool = False,
) -> Float[Array, "*batch n"]:
    """x times the transpose of `weight` [n, k], accumulated in float32.

    Args:
        x: the input, or its form from `quantize_input`.
        weight: array [n, k] in the compute dtype, QTensor, HoistedWeight, TrainedWeight or
            AdaptedWeight.
        out_dtype: dtype of the result.
        exact: a row's result depends on that row and the weight alone, bit for bit
            (pallas_kernels.exact).

    Raises:
        TypeError: a quantized input meets a weight that is not quantized.
    """
    if isinstance(weight, TrainedWeight):
        return trained_linear(x, weight, out_dtype, backend)
    if isinstance(weight, AdaptedWeight):
        base = partial(linear, out_dtype=jnp.float32, backend=backend, exact=exact)
        return rounded(_adapted(exact_dot if exact else dot, base, x, weight, exact), out_dtype)
    if isinstance(x, QTensor) and isinstance(weight, QTensor) and not exact:
        return blockwise_matmul(
            x.values,
            x.scales,
            weight.values,
            weight.scales,
            weight.block,
            out_dtype,
            backend=backend,
        )
    # rounded once, as the trainer's
    product = partial(exact_dot, out_dtype=out_dtype) if exact else dot
    return rounded(_unpacked(product, x, weight), out_dtype)


def grouped_linear(
    x: Float[Array, "m k"] | QTensor | TrainedInput | AdaptedInput,
    weight: Weight,
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype,
    backend: Backend = "auto",
    exact: bool = False,
) -> Float[Array, "m n"]:
    """`linear` of rows that are sorted by group, each with its group's part of `weight` [groups, n,
    k].

    Args:
        group_sizes: rows of each group; rows behind the last group give zero.

    Raises:
        TypeError: a quantized input meets a weight that is not quantized.
    """
    if isinstance(weight, TrainedWeight):
        return trained_grouped_linear(x, weight, group_sizes, out_dtype, backend)
    product = partial(exact_grouped_dot if exact else _grouped_dot, group_sizes=group_sizes)
    if isinstance(weight, AdaptedWeight):
        base = partial(
            grouped_linear,
            group_sizes=group_sizes,
            out_dtype=jnp.float32,
            backend=backend,
            exact=exact,
        )
        return rounded(_adapted(product, base, x, weight, exact), out_dtype)
    if isinstance(x, QTensor) and isinstance(weight, QTensor) and not exact:
        return grouped_matmul(
            x.values,
            x.scales,
            weight.values,
            weight.scales,
            group_sizes,
            weight.block,
            out_dtype,
            backend=backend,
        )
    if exact:
        product = partial(product, out_dtype=out_dtype)
    return rounded(_unpacked(product, x, weight), out_dtype)


def _adapted(
    product: Callable, base: Callable, x: Input, weight: AdaptedWeight, exact: bool
) -> Array:
    """base(x) + scale * (x a^T) b^T, float32: the adapter in its own dtype, on the input as it was
    before quantization."""
    plain = x.plain if isinstance(x, AdaptedInput) else x
    if isinstance(plain, QTensor):
        raise TypeError(
            "linear: the weight has an adapter, which needs the input in its plain form, too"
        )
    inner = rounded(product(rounded(plain, weight.a.dtype), weight.a), weight.a.dtype)
    operand = x.quantized if isinstance(x, AdaptedInput) else x
    return (add_scaled if exact else _add_scaled)(
        base(operand, weight.base), product(inner, weight.b), weight.scale
    )


def _add_scaled(x: Array, y: Array, scale: float) -> Array:
    return x + scale * y


def _unpacked(
    product: Callable, x: Array | QTensor, weight: Array | QTensor | HoistedWeight
) -> Array:
    """`product` of both operands as plain arrays of one dtype, where none takes them as they
    are."""
    if isinstance(x, QTensor):
        if isinstance(weight, QTensor):
            return product(dequantize_rows(x), dequantize(weight))
        if not isinstance(weight, HoistedWeight):
            raise TypeError("linear: the input is quantized but the weight is not")
        x = dequantize_rows(x)
    if isinstance(weight, QTensor):
        return _weight_only(product, x, weight)
    values = weight.values if isinstance(weight, HoistedWeight) else weight
    return product(x if isinstance(values, Integers) else x.astype(values.dtype), values)


def _weight_only(product: Callable, x: Array, weight: QTensor) -> Array:
    """Weight-only quantization: the input is not quantized.

    The backward pass unpacks the weight again. What it would keep otherwise is a float32 copy of a
    frozen FP8 model.
    """
    run = jax.checkpoint(
        lambda x, weight: product(x.astype(jnp.float32), dequantize(weight)), prevent_cse=False
    )
    return run(x, weight)

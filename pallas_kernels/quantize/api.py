"""Blockwise quantization: one scale for each (rows x columns) block of the last two axes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pallas_kernels.backend import Backend, block_name, choose, uses_cpu
from pallas_kernels.partition import partitioned
from pallas_kernels.qtensor import Format, QTensor, ScaledOperand
from pallas_kernels.quantize import cpu, reference
from pallas_kernels.rounding import round_stochastic

Rule = Literal["float32", "power_of_two"]
E4M3 = jnp.float8_e4m3fn
HOPPER_BLOCKS = ((1, 128), (128, 1), (128, 128))
_HOPPER_INPUTS, _HOPPER_DTYPES = ("bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Blocks(Format):
    """Values of one dtype, a float32 scale for each block: what kernels multiply.

    Attributes:
        dtype: name of the values' dtype.
        scale: rule of the scales, as in `quantize_blocks`.
    """

    dtype: str = "float8_e4m3fn"
    scale: Rule = "float32"
    regrouped: ClassVar[bool] = True
    by_block: ClassVar[bool] = True

    def quantize(self, x: Float[Array, "*batch m n"], backend: Backend = "auto") -> QTensor:
        """`quantize_blocks`."""
        return quantize_blocks(x, self.block, jnp.dtype(self.dtype), self.scale, backend=backend)

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Multiply values with the scale of their block, in float32."""
        return q.values.astype(jnp.float32) * self._expanded(q)

    def limit(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """The format's largest value times the scale."""
        return float(jnp.finfo(self.dtype).max) * self._expanded(q)

    def scaled_operand(self, q: QTensor) -> ScaledOperand | None:
        """Scales that are powers of two are E8M0's; a device's groups of 32 have their block's."""
        (rows, columns), (*batch, m, k) = self.block, q.shape
        known = self.dtype in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
        if self.scale != "power_of_two" or not known or batch or columns % 32 or k % 32:
            return None
        scales = reference.expand_scales(q.scales, (rows, columns // 32), (m, k // 32))
        return ScaledOperand(q.values, scales.astype(jnp.float8_e8m0fnu))

    def store(
        self, x: Float[Array, "*batch m n"], key: Key[Array, ""], backend: Backend = "auto"
    ) -> QTensor:
        """Quantize what is not negative, rounded stochastically; what is too small for a step is
        kept at the smallest one, but in a block that is 0."""
        q, shape = self.quantize(x, backend), x.shape[-2:]
        info = jnp.finfo(self.dtype)
        scaled = x * reference.expand_scales(1.0 / q.scales, self.block, shape)
        amax = reference.expand_scales(reference.block_amax(x, self.block), self.block, shape)
        smallest = jnp.where(amax > 0, float(info.smallest_subnormal), 0.0)
        floored = jnp.maximum(jnp.clip(scaled, 0.0, float(info.max)), smallest)
        return replace(q, values=round_stochastic(floored, q.values.dtype, key))

    def _expanded(self, q: QTensor) -> Float[Array, "*batch m n"]:
        return reference.expand_scales(q.scales, self.block, q.shape[-2:])

    @property
    def transposed(self) -> Blocks:
        return replace(self, block=self.block[::-1])

    @property
    def name(self) -> str:
        return f"{self.dtype} in blocks of {block_name(self.block)}"


def quantize_blocks(
    x: Float[Array, "*batch m n"],
    block: tuple[int, int] = (1, 128),
    dtype: jnp.dtype = E4M3,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> QTensor:
    """Quantize `x` in blocks of the last two axes, with a scale for each.

    Blocks of 1x128 and 128x128 are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).

    Args:
        x: any float dtype; hopper takes bfloat16 and float32. Axes that are no multiple of the
            block are a normal case: the last block is shorter.
        block: (rows, columns) that share a scale: (1, 128) for activations, (128, 128) for weights,
            (128, 1) along tokens; hopper has these three.
        dtype: element dtype, `float8_e4m3fn` (largest value 448) or `float8_e5m2` (57344).
        scale: "float32" is amax / max; "power_of_two" rounds that up to a power of two (the UE8M0
            rule).
        backend: implementation; "auto" is the reference for what hopper has no kernel for.

    Returns:
        In `Blocks`; values of the shape of `x`, clamped to +-max before the cast (a bare cast gives
        NaN above 464 on a CPU). An all-zero block has scale 1. A block that holds a NaN or an
        infinity has a non-finite scale, so that the fault stays visible downstream.

        All backends return the same bits.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: `x` has fewer than two axes or no elements, or a block side is not positive.
    """
    check("quantize_blocks", x, block)
    chosen = chosen_backend("quantize_blocks", backend, block, dtype, x.dtype)
    if chosen in _PLAIN:
        return _in_blocks(_PLAIN[chosen].quantize(x, block, dtype, scale), block, scale)
    from pallas_kernels.quantize import hopper

    lead, rows, columns = axes(x.ndim), *_scale_axes(block)
    rule = f"{lead} m n -> {lead} m n, {lead} {rows} {columns}"
    kernel = partitioned(
        partial(hopper.quantize_blocks, block=block, dtype=dtype, rule=scale), rule, BLOCKS
    )
    return _in_blocks(kernel(x), block, scale)


def _in_blocks(arrays: tuple[Array, Array], block: tuple[int, int], scale: Rule) -> QTensor:
    values, scales = arrays
    return QTensor(values, scales, Blocks(block, values.dtype.name, scale))


def quantize_both(
    x: Float[Array, "*batch m n"],
    size: int = 128,
    dtype: jnp.dtype = E4M3,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> tuple[QTensor, QTensor]:
    """Quantize `x` in blocks of (1, size) and of (size, 1), from one read of it.

    A backward pass wants an output gradient in both: along outputs for the input's gradient, along
    tokens for the weight's.

    Args:
        x, dtype, scale, backend: as in `quantize_blocks`.
        size: length of a group; 128 on hopper.

    Returns:
        In blocks of (1, size), and of (size, 1). Hopper writes the values of the second as [n, m]
        and returns its transposed view: a product along tokens transposes again, and under one jit
        neither is computed.

    Raises:
        BackendError, ValueError: as `quantize_blocks`.
    """
    check("quantize_both", x, (1, size))
    chosen = chosen_backend("quantize_both", backend, (1, size), dtype, x.dtype)
    if chosen in _PLAIN:
        rows, tokens = (
            _PLAIN[chosen].quantize(x, block, dtype, scale) for block in ((1, size), (size, 1))
        )
    else:
        from pallas_kernels.quantize import hopper

        lead = axes(x.ndim)
        rule = f"{lead} m n -> {lead} m n, {lead} m b, {lead} m n, {lead} a n"
        kernel = partial(_flat, hopper.quantize_both, dtype=dtype, rule=scale)
        arrays = partitioned(kernel, rule, BLOCKS)(x)
        rows, tokens = arrays[:2], arrays[2:]
    return _in_blocks(rows, (1, size), scale), _in_blocks(tokens, (size, 1), scale)


def regroup(
    q: QTensor, dtype: jnp.dtype = E4M3, scale: Rule = "float32", *, backend: Backend = "auto"
) -> QTensor:
    """Quantize in blocks of (size, 1) what is quantized in blocks of (1, size), read as it is.

    Args:
        q: [m, n], in blocks of (1, size).
        dtype, scale, backend: of the result, as in `quantize_both`.

    Returns:
        `quantize_blocks(q.dequantize(), (size, 1))`.

    Raises:
        BackendError, ValueError: as `quantize_blocks`; ValueError also where the scales do not
            belong to the values.
    """
    size = q.block[1]
    check("regroup", q.values, (size, 1))
    if q.scales.shape != (len(q.values), -(-q.shape[1] // size)):
        raise ValueError(
            f"regroup: scales {q.scales.shape} are not those of values {q.shape} in blocks of "
            f"(1, {size})"
        )
    chosen = chosen_backend("regroup", backend, (size, 1), dtype, q.values.dtype, _HOPPER_DTYPES)
    if chosen in _PLAIN:
        wide = dequantize(q, backend=backend)
        arrays = _PLAIN[chosen].quantize(wide, (size, 1), dtype, scale)
    else:
        from pallas_kernels.quantize import hopper

        kernel = partial(hopper.regroup, dtype=dtype, rule=scale)
        arrays = partitioned(kernel, "m n, m b -> m n, a n", BLOCKS)(q.values, q.scales)
    return _in_blocks(arrays, (size, 1), scale)


def dequantize(q: QTensor, *, backend: Backend = "auto") -> Float[Array, "*batch m n"]:
    """Compute `q.dequantize()`, float32.

    Args:
        q: in any format.
        backend: "cpu" has a kernel for most `Blocks`; all others are the format's own.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """
    fmt = q.format
    if (
        isinstance(fmt, Blocks)
        and cpu.stores(fmt.block, fmt.dtype)
        and uses_cpu(backend, "dequantize")
    ):
        return cpu.dequantize(q.values, q.scales, fmt.block)
    return q.dequantize()


def round_blocks(
    x: Float[Array, "*batch m n"],
    block: tuple[int, int],
    dtype: jnp.dtype,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> Float[Array, "*batch m n"]:
    """Compute `quantize_blocks(x, block, ...).dequantize()`, float32, with no value stored in 8
    bits, whose casts a CPU emulates.

    Args:
        x, block, dtype, scale: as `quantize_blocks` takes them.
        backend: all but "cpu" are the reference.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """
    if cpu.rounds(block) and uses_cpu(backend, "round_blocks"):
        return cpu.round_blocks(x, block, dtype, scale)
    return reference.round_blocks(x, block, dtype, scale)


def quantize_swiglu(
    gate: Float[Array, "*batch n"],
    up: Float[Array, "*batch n"],
    size: int = 128,
    dtype: jnp.dtype = E4M3,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> QTensor:
    """Quantize silu(gate) * up (arXiv 2002.05202) in blocks of (1, size).

    The product is never in memory itself.

    silu(gate) and the product are each rounded to the dtype of `gate`, as torch and vLLM round
    them. Another backend's exponential may differ in its last float32 bit, and a number then by one
    step of that dtype before it is quantized.

    Args:
        gate, up: one shape and dtype; bfloat16 or float32 on hopper.
        size, dtype, scale, backend: as in `quantize_both`.

    Returns:
        As `quantize_blocks`.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: `gate` and `up` differ in shape or dtype, or have no elements.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"quantize_swiglu: gate is {gate.dtype}{gate.shape}, up {up.dtype}{up.shape}; they "
            "must be alike"
        )
    check("quantize_swiglu", gate, (1, size))
    if chosen_backend("quantize_swiglu", backend, (1, size), dtype, gate.dtype) == "reference":
        arrays = reference.quantize(reference.swiglu(gate, up), (1, size), dtype, scale)
    else:
        from pallas_kernels.quantize import hopper

        lead = axes(gate.ndim + 1)
        kernel = partial(hopper.quantize_swiglu, dtype=dtype, rule=scale)
        rule = f"{lead} n, {lead} n -> {lead} n, {lead} b"
        arrays = partitioned(kernel, rule, BLOCKS)(gate, up)
    return _in_blocks(arrays, (1, size), scale)


def quantize_rms_norm(
    x: Float[Array, "*batch n"],
    weight: Float[Array, " n"],
    eps: float,
    offset: float = 0.0,
    size: int = 128,
    dtype: jnp.dtype = E4M3,
    scale: Rule = "float32",
    *,
    backend: Backend = "auto",
) -> QTensor:
    """Quantize x / sqrt(mean(x^2) + eps) * (offset + weight) in blocks of (1, size).

    RMS norm: arXiv 1910.07467.

    The norm is computed in float32 and rounded to the dtype of `x`. Both backends take mean(x^2)
    from the same reduction of XLA.

    Args:
        x: bfloat16 or float32 on hopper.
        weight, eps, offset: of the norm; `offset` is 1 where a checkpoint stores the gain less one.
        size, dtype, scale, backend: as in `quantize_both`.

    Returns:
        As `quantize_blocks`.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: `weight` is not one number for each column of `x`, or `x` has no elements.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"quantize_rms_norm: weight {weight.shape} is not that of rows of x {x.shape}"
        )
    check("quantize_rms_norm", x, (1, size))
    inverse, gain = reference.inverse_rms(x, eps), reference.gain(weight, offset)
    if chosen_backend("quantize_rms_norm", backend, (1, size), dtype, x.dtype) == "reference":
        arrays = reference.quantize(reference.rms_norm(x, inverse, gain), (1, size), dtype, scale)
    else:
        from pallas_kernels.quantize import hopper

        lead = axes(x.ndim + 1)
        kernel = partial(hopper.quantize_rms_norm, dtype=dtype, rule=scale)
        rule = f"{lead} n, {lead} one, n -> {lead} n, {lead} b"
        arrays = partitioned(kernel, rule, BLOCKS, ("one",))(x, inverse, gain)
    return _in_blocks(arrays, (1, size), scale)


_PLAIN = {"reference": reference, "cpu": cpu}
"""Modules of the backends that are not Pallas's."""
BLOCKS = {"a": ("m", 128), "b": ("n", 128)}
"""Factors of a sharding rule that count blocks: of rows, of columns."""


def axes(ndim: int) -> str:
    """Name the factors of all axes but the last two."""
    return " ".join(f"l{axis}" for axis in range(ndim - 2))


def _scale_axes(block: tuple[int, int]) -> tuple[str, str]:
    return "m" if block[0] == 1 else "a", "n" if block[1] == 1 else "b"


def _flat(function, x, **options):
    return tuple(array for pair in function(x, **options) for array in pair)


def check(operation: str, x: Array, block: tuple[int, int]) -> None:
    """Refuse what cannot be quantized.

    Raises:
        ValueError: too few axes, no elements, or a block side that is not positive.
    """
    if x.ndim < 2 or min(block) < 1:
        raise ValueError(
            f"{operation}: need at least two axes and a positive block, got shape {x.shape}, "
            f"block {block}"
        )
    if x.size == 0:
        raise ValueError(f"{operation}: nothing to quantize in shape {x.shape}")


def chosen_backend(
    operation: str,
    backend: Backend,
    block: tuple[int, int],
    dtype: jnp.dtype,
    x_dtype: jnp.dtype,
    inputs=_HOPPER_INPUTS,
) -> str:
    """Choose the backend of a quantizer.

    Under "auto" the reference where hopper, or the kernel for CPUs, does not serve this.
    """
    made, given = jnp.dtype(dtype).name, jnp.dtype(x_dtype).name
    served = block in HOPPER_BLOCKS and made in _HOPPER_DTYPES and given in inputs
    chosen = choose(
        operation,
        backend,
        "" if served else f"quantizer from {given} to {made} in blocks of {block_name(block)}",
    )
    return "reference" if chosen == "cpu" and not cpu.stores(block, dtype) else chosen

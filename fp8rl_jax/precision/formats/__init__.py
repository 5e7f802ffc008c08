"""What a format does: from the name that a recipe has for it to the object that quantizes.

A recipe names formats (config.formats). An element type in blocks of its own is `Blocks`, which
kernels multiply. Everything else that a name can stand for is a `Format` of its own, added in one
file, in this folder or in anyone's program:

    @dataclass(frozen=True)
    class Mine(Format):
        block: tuple[int, int] = (1, 16)

        def quantize(self, x, backend="auto"): ...
        def dequantize(self, q): ...
        def limit(self, q): ...

    register("mine", Mine())

`rollout.weight = "mine"` then quantizes with it, in a run, a plan, a comparison and a checkpoint
alike. It is multiplied dequantized, in float32: a kernel that multiplies it as it is stored is
another matter. A `WeightFormat` is refused where it is not of weights.

What comes with the library (`BUILT_IN`): MX formats (mx.py), NVFP4, INT4 weights, floats of any few
bits (minifloat.py), and FP4 with a scale a row, with and without clamped outliers (fp4.py).
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType

import jax.numpy as jnp

from fp8rl_jax.config.formats import MINIFLOATS, WHOLE, TensorFormat, register_name
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision.formats.drawn import Drawn
from fp8rl_jax.precision.formats.fp4 import FP4, ClampedFP4
from fp8rl_jax.precision.formats.int4 import Int4
from fp8rl_jax.precision.formats.minifloat import Minifloat
from fp8rl_jax.precision.formats.mx import MX, MXFP4
from fp8rl_jax.precision.formats.nvfp4 import NVFP4
from fp8rl_jax.precision.formats.weights import WeightFormat
from pallas_kernels import Blocks, Format

_REGISTERED: dict[str, Format] = {}


def register(name: str, made: Format) -> TensorFormat:
    """Make a format known by a name, wherever a recipe is read.

    Args:
        name: letters, digits and underscores; other blocks of it are name-ROWSxCOLUMNS.
        made: a frozen dataclass.

    Raises:
        UserError: the name belongs to another.
    """
    if _REGISTERED.get(name, made) != made:
        raise UserError(f"format {name!r} is registered already, as {_REGISTERED[name].name}")
    fmt = register_name(name, made.block)
    _REGISTERED[name] = made
    return fmt


def format_of(fmt: TensorFormat, shape: tuple[int, ...] = ()) -> Format:
    """Look up what quantizes.

    Args:
        fmt: not the compute dtype.
        shape: of the tensor: one scale for each trailing matrix where the format has no block, and
            for a whole axis where its block says so, which without a shape stays WHOLE.

    Raises:
        UserError: the format cannot be stored.
    """
    made = _REGISTERED.get(fmt.element)
    rows, columns = fmt.block or (made.block if made else (WHOLE, WHOLE))
    shape = shape or (WHOLE, WHOLE)
    block = rows or shape[-2], columns or shape[-1]
    if made:
        return replace(made, block=block)
    if fmt.scale == "none":
        raise UserError(f"{fmt.name} has no scale, and is a dtype, not a format of blocks")
    return Blocks(block, fmt.element_type.dtype, fmt.scale)


def in_blocks(fmt: TensorFormat) -> bool:
    """Whether a format is `Blocks`, an element type with a float32 scale for each."""
    return fmt.element not in _REGISTERED


def of_weights_alone(fmt: TensorFormat) -> bool:
    """Whether a format is a `WeightFormat`."""
    return isinstance(_REGISTERED.get(fmt.element), WeightFormat)


def has(fmt: TensorFormat, method: FunctionType) -> bool:
    """Whether a format has of its own what `Format` leaves to those that can:
    `has(fmt, Format.store)`.

    Raises:
        UserError: the format cannot be stored.
    """
    made = type(format_of(fmt, (1, 1)))
    return getattr(made, method.__name__) is not method


def element_dtype(fmt: TensorFormat) -> jnp.dtype:
    """Look up the dtype of the stored values.

    Raises UserError for the compute dtype, which is not stored as a format.
    """
    return jnp.dtype(fmt.element_type.dtype)


def max_value(fmt: TensorFormat) -> float:
    """Look up the largest finite value: 448 for e4m3, 57344 for e5m2.

    Raises UserError for the compute dtype.
    """
    return fmt.element_type.largest


def mantissa_bits(fmt: TensorFormat) -> int | None:
    """Look up the bits of the mantissa of a format's numbers; None where all are one step apart, or
    a format of one's own does not say."""
    if in_blocks(fmt):
        return jnp.finfo(element_dtype(fmt)).nmant
    made = _REGISTERED[fmt.element]
    return made.mantissa if isinstance(made, Drawn) else None


BUILT_IN: dict[str, Format] = {
    "mxfp8": MX(),
    "mxfp8_floor": MX(scale="floor"),
    "mxfp8_e5m2": MX(element="e5m2"),
    "mxfp8_e5m2_floor": MX(element="e5m2", scale="floor"),
    "mxfp6": MX(element="e2m3", scale="floor"),
    "mxfp6_up": MX(element="e2m3"),
    "mxfp6_e3m2": MX(element="e3m2", scale="floor"),
    "mxfp6_e3m2_up": MX(element="e3m2"),
    "mxfp4": MXFP4(),
    "mxfp4_up": MXFP4(scale="up"),
    "nvfp4": NVFP4(),
    "nvfp4_rows": NVFP4(outer="row"),
    "nvfp4_four_over_six": NVFP4(four_over_six=True),
    "nvfp4_rows_four_over_six": NVFP4(outer="row", four_over_six=True),
    "int4": Int4(),
    "fp4": FP4(),
    "fp4_clamped": ClampedFP4(),
    "fp4_clamped_tensor": ClampedFP4(of="tensor"),
    **{
        name: Minifloat(exponent=exponent, mantissa=mantissa)
        for name, (exponent, mantissa) in MINIFLOATS.items()
    },
}
"""What comes with the library, by the names that config.formats knows."""

for _name, _made in BUILT_IN.items():
    register(_name, _made)

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
another matter.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from fp8rl_jax.config.formats import TensorFormat, register_name
from fp8rl_jax.errors import UserError
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
        shape: of the tensor: one scale for each trailing matrix where the format has no block.

    Raises:
        UserError: the format cannot be stored.
    """
    if made := _REGISTERED.get(fmt.element):
        return replace(made, block=fmt.block or made.block)
    block = fmt.block or (shape[-2], shape[-1])
    return Blocks(block, fmt.element_type.dtype, fmt.scale)


def in_blocks(fmt: TensorFormat) -> bool:
    """Whether a format is `Blocks`, an element type with a float32 scale for each."""
    return fmt.element not in _REGISTERED


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

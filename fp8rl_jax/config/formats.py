"""Number formats: an element type, the block that shares a scale, and the rule of that scale, as
one object.

A format is written as it is read: ELEMENT[-ROWSxCOLUMNS][-SCALE].

    compute                     not quantized: the run's compute dtype
    e4m3                        one float32 scale for the whole tensor
    e4m3-128x128                blocks of 128 x 128, a float32 scale each
    e4m3-1xall                  a scale for each row, however long
    e4m3-1x32-power_of_two      groups of 32 along a row, scales rounded up to a power of two
                                (UE8M0)
    mxfp8, nvfp4, int4, e3m2    what has a quantizer of its own, in its usual blocks
    nvfp4-16x16                 the same in others

What is kept between updates (recipe.STATE_ROLES) has three more, without a scale unless one is
named:

    float32, bfloat16, float16  the dtype as it is
    float16-power_of_two        float16 with one scale for the whole tensor, a power of two

An element type is registered with `register_element`, and then known wherever a recipe is read. A
format that is more than an element type in blocks brings its own quantizer, and a name:
`precision.formats.register`. What has to follow elsewhere is a kernel that multiplies it:
precision/check.py refuses a pair that no backend takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, cast, get_args

from fp8rl_jax.errors import UserError

ScaleRule = Literal["float32", "power_of_two"]
_Scale = Literal["float32", "power_of_two", "none"]


@dataclass(frozen=True)
class ElementType:
    """What one value is stored as."""

    name: str
    """Name in a format, such as "e4m3"."""
    dtype: str
    """Name of the dtype in numpy, ml_dtypes and JAX, such as "float8_e4m3fn"."""
    largest: float
    """Largest finite value."""
    bits: int
    """Bits of one value."""


ELEMENTS: dict[str, ElementType] = {
    element.name: element
    for element in (
        # OCP 8-bit floating point (arXiv 2209.05433): e4m3 has no infinity
        ElementType("e4m3", "float8_e4m3fn", 448.0, 8),
        ElementType("e5m2", "float8_e5m2", 57344.0, 8),
        # IEEE's rules with another split of the bits
        ElementType("e3m4", "float8_e3m4", 15.5, 8),
    )
}
"""The element types by name; "compute" is none of them."""

WIDE: dict[str, ElementType] = {
    element.name: element
    for element in (
        ElementType("float32", "float32", 3.4028234663852886e38, 32),
        ElementType("bfloat16", "bfloat16", 3.3895313892515355e38, 16),
        ElementType("float16", "float16", 65504.0, 16),
    )
}
"""What a training state may be kept in beside them; no product takes these as formats."""

MINIFLOATS = {
    f"e{exponent}m{mantissa}": (exponent, mantissa)
    for exponent in range(2, 6)
    for mantissa in range(8)
    if f"e{exponent}m{mantissa}" not in ELEMENTS
}
"""Bits of exponent and mantissa of the floats that no dtype stores, by name."""

WHOLE = 0
"""In a block: the whole axis."""

WITH_OWN_QUANTIZER: dict[str, tuple[int, int]] = {
    "mxfp8": (1, 32),
    "mxfp8_floor": (1, 32),
    "mxfp8_e5m2": (1, 32),
    "mxfp8_e5m2_floor": (1, 32),
    "mxfp6": (1, 32),
    "mxfp6_up": (1, 32),
    "mxfp6_e3m2": (1, 32),
    "mxfp6_e3m2_up": (1, 32),
    "mxfp4": (1, 32),
    "mxfp4_up": (1, 32),
    "nvfp4": (1, 16),
    "nvfp4_rows": (1, 16),
    "nvfp4_four_over_six": (1, 16),
    "nvfp4_rows_four_over_six": (1, 16),
    "int4": (1, 32),
    "fp4": (1, WHOLE),
    "fp4_clamped": (1, WHOLE),
    "fp4_clamped_tensor": (1, WHOLE),
    **dict.fromkeys(MINIFLOATS, (1, 128)),
}
"""Names that stand for more than an element type in blocks, and their usual blocks: those that come
with the library (precision.formats.BUILT_IN), and what `precision.formats.register` adds."""


@dataclass(frozen=True)
class TensorFormat:
    """How the values of one tensor role are stored and multiplied.

    Raises:
        UserError: an unknown element or scale rule, a block that is no pair of positive sizes, or a
            compute dtype with either.
    """

    element: str = "compute"
    """Name of the element type, or of a format with its own quantizer; "compute" is the run's
    compute dtype, that is: not quantized."""
    block: tuple[int, int] | None = None
    """(rows, columns) that share one scale, WHOLE for all of an axis; None: one scale for the whole
    tensor."""
    scale: _Scale = "float32"
    """Scale values: amax / largest as it is, or rounded up to a power of two (UE8M0). none: of WIDE
    alone, whose values are stored as they are."""

    def __post_init__(self) -> None:
        known = ["compute", *ELEMENTS, *WIDE, *WITH_OWN_QUANTIZER]
        if self.element not in known:
            raise UserError(
                f"unknown element {self.element!r}{_nearest(self.element)} (known: {_known()})"
            )
        if self.scale not in get_args(_Scale if self.element in WIDE else ScaleRule):
            raise UserError(
                f"unknown scale {self.scale!r} (known: {', '.join(get_args(ScaleRule))})"
            )
        if self.element in ("float32", "bfloat16") and (self.scale != "none" or self.block):
            raise UserError(
                f"{self.element} takes neither scale nor block, and is of what is kept between "
                f"updates alone; write {self.element!r}"
            )
        if self.scale == "none" and self.block is not None:
            raise UserError(f"{self.element} without a scale has no block; name a scale, too")
        sound = (
            isinstance(self.block, tuple)
            and len(self.block) == 2
            and all(isinstance(n, int) and n >= WHOLE for n in self.block)
            and self.block != (WHOLE, WHOLE)
        )
        if self.block is not None and not sound:
            raise UserError(
                f"block must be two positive sizes, rows and columns, and is {self.block}"
            )
        if not self.quantized and (self.block is not None or self.scale != "float32"):
            raise UserError(
                'the compute dtype has neither block nor scale; write "compute" and no more'
            )

    @property
    def quantized(self) -> bool:
        return self.element != "compute"

    @property
    def calibrated(self) -> bool:
        """Whether queries, keys or values in it have a scale that is measured beforehand: an
        element type without blocks. All else finds its scales in what it quantizes."""
        return self.element in ELEMENTS and self.block is None

    @property
    def element_type(self) -> ElementType:
        """The element type. Raises UserError for what has none."""
        if self.element not in ELEMENTS | WIDE:
            raise UserError(
                f"format {self.element!r} cannot be stored as one element type (supported: "
                f"{', '.join(ELEMENTS)})"
            )
        return (ELEMENTS | WIDE)[self.element]

    @property
    def name(self) -> str:
        """The text that `parse_format` makes this format of: its registered name, or its parts."""
        block = [] if self.block is None else [block_text(self.block)]
        scale = [] if self.scale == _usual_scale(self.element) else [self.scale]
        return "-".join([self.element, *block, *scale])


COMPUTE = TensorFormat()
FLOAT32 = TensorFormat("float32", scale="none")

_PARTS = re.compile(
    r"(?P<element>\w+)(-(?P<rows>\d{1,9}|all)x(?P<columns>\d{1,9}|all))?(-(?P<scale>[a-z]\w+))?"
)


def parse_format(text: str) -> TensorFormat:
    """The format that `text` names.

    Args:
        text: a registered name, or ELEMENT[-ROWSxCOLUMNS][-SCALE].

    Raises:
        UserError: it is neither.
    """
    if (parts := _PARTS.fullmatch(text)) is None:
        raise UserError(
            f"{text!r} is no format; write ELEMENT[-ROWSxCOLUMNS][-SCALE], such as e4m3-1x128 or "
            f"e4m3-1x32-power_of_two (elements: {_known()})"
        )
    block = None if parts["rows"] is None else (_side(parts["rows"]), _side(parts["columns"]))
    block = block or WITH_OWN_QUANTIZER.get(parts["element"])
    scale = parts["scale"] or _usual_scale(parts["element"])
    return TensorFormat(parts["element"], block, cast(_Scale, scale))


def _usual_scale(element: str) -> str:
    """Of a name that names none."""
    return "none" if element in WIDE else "float32"


def register_element(element: ElementType) -> ElementType:
    """Makes an element type known by its name; ml_dtypes has the dtype.

    Raises:
        UserError: the name belongs to another, or is none that a format can begin with.
    """
    _check_name(element.name)
    if element.name in WITH_OWN_QUANTIZER:
        raise UserError(f"format {element.name!r} is registered already, with its own quantizer")
    if ELEMENTS.setdefault(element.name, element) != element:
        raise UserError(
            f"element {element.name!r} is registered already, as {ELEMENTS[element.name]}"
        )
    return element


def register_name(name: str, block: tuple[int, int]) -> TensorFormat:
    """Makes the name of a format with its own quantizer known: half of
    `precision.formats.register`.

    Args:
        block: its usual one; NAME-ROWSxCOLUMNS has another.

    Raises:
        UserError: the name belongs to another, or is none that a format can begin with.
    """
    _check_name(name)
    if name in ELEMENTS or WITH_OWN_QUANTIZER.setdefault(name, block) != block:
        raise UserError(f"format {name!r} is registered already")
    return TensorFormat(name, block)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z]\w*", name) or name in ("compute", *WIDE):
        raise UserError(
            f"element {name!r}: a name is a letter and letters, digits or underscores, and not "
            f"{', '.join(['compute', *WIDE])}"
        )


def _side(text: str) -> int:
    """Of a block; 0 is refused as a size, which WHOLE would be read for."""
    return WHOLE if text == "all" else int(text) or -1


def block_text(block: tuple[int, int]) -> str:
    """A block as a format's name has it: 1x128, 1xall."""
    return "x".join("all" if size == WHOLE else str(size) for size in block)


def _known() -> str:
    own = [name for name in WITH_OWN_QUANTIZER if name not in MINIFLOATS]
    return ", ".join(["compute", *ELEMENTS, *own, "eXmY of 2 to 5 and 0 to 7 bits"])


def _nearest(text: str) -> str:
    known = [name for name in (*ELEMENTS, *WITH_OWN_QUANTIZER) if name not in MINIFLOATS]
    near = get_close_matches(text, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

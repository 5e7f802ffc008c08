"""The rows of the page: a format of the weights, what is multiplied with it, and what it costs."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fp8rl_jax.config.formats import COMPUTE, WITH_OWN_QUANTIZER, parse_format
from fp8rl_jax.config.recipe import ForwardFormats, GradientRounding, GradientTransform, Recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision import format_of, quantize
from fp8rl_jax.precision.formats.minifloat import Minifloat
from fp8rl_jax.precision.formats.mx import MX

BACKEND = "reference"
BFLOAT16 = "bfloat16"
"""The row that is no format: everything is computed in bfloat16."""
BASELINE = "compute"
"""What the rows are trained against: nothing quantized."""


@dataclass(frozen=True)
class Row:
    """A format of the weights, and the formats that go with it.

    Attributes:
        name: the weights' format, as a recipe has it; or BFLOAT16.
        activation, gradient: formats of the linears' inputs and output gradients.
        rounding, transform: of the gradients, as a recipe has them.
    """

    name: str
    activation: str = "compute"
    gradient: str = "compute"
    rounding: GradientRounding = "nearest"
    transform: GradientTransform = "none"

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype of what serves it."""
        return jnp.dtype(self.name if self.name == BFLOAT16 else "float32")

    @property
    def quantizes_activations(self) -> bool:
        """Whether it is more than a format of weights."""
        return self.activation != "compute" or self.name == BFLOAT16

    @property
    def both(self) -> ForwardFormats:
        """Formats of weights and activations."""
        if self.name == BFLOAT16:
            return ForwardFormats()
        return ForwardFormats(parse_format(self.name), parse_format(self.activation))

    @property
    def rollout_only(self) -> Recipe:
        """Served in the format, trained without."""
        return Recipe("formats", rollout=self.both)

    @property
    def weights_only(self) -> Recipe:
        """The weights alone are served in it."""
        return Recipe("formats", rollout=replace(self.both, activation=COMPUTE))

    @property
    def forward(self) -> Recipe:
        """The forward passes of both sides are in the format."""
        return Recipe("formats", rollout=self.both, trainer=self.both)

    @property
    def unified(self) -> Recipe:
        """Both sides are in the format, the backward pass included."""
        saved = self.both.activation
        gradient = parse_format(self.gradient)
        draws = {"gradient_rounding": self.rounding, "gradient_transform": self.transform}
        return replace(
            self.forward,
            output_gradient=gradient,
            saved_activation=saved,
            **(draws if gradient.quantized else {}),
        )


def _alike(*names: str) -> list[Row]:
    """Rows with one format in all roles."""
    return [Row(name, name, name) for name in names]


def _blocks(element: str, scale: str = "") -> Row:
    """Weights in 128x128, the rest in 1x128."""
    groups = f"{element}-1x128{scale}"
    return Row(f"{element}-128x128{scale}", groups, groups)


ROWS = (
    Row(BFLOAT16),
    _blocks("e4m3"),
    _blocks("e4m3", "-power_of_two"),
    *_alike("mxfp8", "mxfp6", "mxfp4"),
    Row("nvfp4", "nvfp4_rows"),
    Row("nvfp4-16x16", "nvfp4_rows", "nvfp4", "stochastic", "hadamard"),
    Row("int4-1x32"),
    Row("int4-1x128"),
    Row("e4m3", "e4m3-1xall", "e4m3-1xall"),
    *_alike("e4m3-1xall", "e4m3-1x128", "e4m3-1x32"),
    _blocks("e5m2"),
    _blocks("e3m4"),
    *_alike("mxfp8_floor", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4_up"),
    Row("nvfp4_four_over_six", "nvfp4_rows"),
    *_alike("e4m2", "e2m3", "e3m2", "e2m2", "e2m1"),
)
"""In the order in which they are measured."""


def registered_by(path: str) -> list[Row]:
    """Import a Python file, and make a row of each format that it registers.

    Raises:
        UserError: it is none, or registers none.
    """
    file, before = Path(path), set(WITH_OWN_QUANTIZER)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"--module: {path} is no Python file")
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem).__name__
    names = [
        name
        for name in WITH_OWN_QUANTIZER
        # one that was imported before has registered them already
        if name not in before or type(format_of(parse_format(name))).__module__ == module
    ]
    if not names:
        raise UserError(f"--module: {path} registers no format (precision.formats.register)")
    return _alike(*names)


def chosen(names: Sequence[str], modules: Sequence[str]) -> list[Row]:
    """Pick rows by name, all of them where none is named.

    Args:
        modules: Python files that register formats.

    Raises:
        UserError: a name that is none of them.
    """
    rows = {row.name: row for row in (*ROWS, *(r for path in modules for r in registered_by(path)))}
    if unknown := [name for name in names if name not in rows]:
        raise UserError(f"--rows: {', '.join(unknown)} unknown (known: {', '.join(rows)})")
    return [rows[name] for name in names or rows]


def restored(x: Float[Array, "*batch m n"], name: str) -> Float[Array, "*batch m n"]:
    """Quantize and dequantize, float32."""
    if name == BFLOAT16:
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    return quantize(x, parse_format(name), BACKEND).dequantize()


SHAPE = (576, 1536)
"""Of the weight whose bits are counted: SmolLM2's down_proj."""


def bits(name: str) -> dict[str, float]:
    """Count bits an element with all scales: `nominal`, as a device would store it, and `stored`,
    as it is kept here."""
    if name == BFLOAT16:
        return {"nominal": 16.0, "stored": 16.0}
    fmt = format_of(parse_format(name), SHAPE)
    q = jax.eval_shape(lambda x: fmt.quantize(x, BACKEND), jax.ShapeDtypeStruct(SHAPE, "float32"))
    count = math.prod(SHAPE)
    whole, values = (
        sum(x.size * x.dtype.itemsize * 8 for x in jax.tree.leaves(of)) / count
        for of in (q, q.values)
    )
    element = values
    if isinstance(fmt, Minifloat):
        element = 1 + fmt.exponent + fmt.mantissa
    elif isinstance(fmt, MX):
        element = 1 + int(fmt.element[1]) + int(fmt.element[3])
    return {"nominal": whole - values + element, "stored": whole}


def fingerprint(row: Row) -> dict[str, float]:
    """What a row's quantizers make of fixed numbers: relative errors, to four digits.

    A record whose rows have another one was made by other code.
    """
    drawn = np.random.default_rng(0)
    x = (drawn.normal(size=(144, 160)) * np.exp(drawn.normal(size=(144, 160)))).astype(np.float32)
    formats = {"weight": row.name, "activation": row.activation, "gradient": row.gradient}
    return {
        role: float(f"{np.linalg.norm(restored(jnp.asarray(x), name) - x) / np.linalg.norm(x):.4g}")
        for role, name in formats.items()
        if name != "compute"
    }

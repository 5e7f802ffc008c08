"""Which linears are quantized: computed once, from the recipe's patterns and the model's layer
names.

Upstream, a substring rule once kept gate and up projections in bfloat16 on one side only (verl PR
7519). Here both sides, the exporter and `fp8rl doctor` read this one list, and a pattern that
matches nothing is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.errors import UserError


def quantized_layers(recipe: Recipe, linears: Sequence[str]) -> tuple[str, ...]:
    """List the linears that a recipe quantizes, on one side at least, in model order.

    Args:
        recipe: its patterns are matched against whole names; the layers that it keeps in the
            compute dtype at both ends of the model are taken out. `Recipe.of_linear` has the
            formats of each.
        linears: every linear of the model that may be quantized, such as "layers.3.q_proj".

    Raises:
        UserError: a pattern matches no linear of the model, or nothing is left to quantize.
    """
    if not recipe.quantizes_linears:
        return ()
    rules = tuple(rule.pattern for rule in recipe.layers)
    for key, patterns in (
        ("quantized", recipe.quantized),
        ("excluded", recipe.excluded),
        ("layers", rules),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in linears):
                raise UserError(
                    f"recipe {recipe.name!r}: {key} pattern {pattern!r} matches no linear of the "
                    "model "
                    f"(names look like {linears[0]!r})"
                )

    layers = 1 + max(map(_layer, linears))
    chosen = tuple(name for name in linears if not why_in_compute(recipe, name, layers))
    if sum(_ends(recipe, layers)) >= layers:
        raise UserError(
            f"recipe {recipe.name!r}: first_layers_in_compute = {recipe.first_layers_in_compute:g} "
            "and last_layers_in_compute = "
            f"{recipe.last_layers_in_compute:g} leave none of {layers} layers to quantize"
        )
    if not chosen:
        raise UserError(
            f"recipe {recipe.name!r}: every linear is excluded, so nothing would be quantized"
        )
    return chosen


def quantized_on(
    recipe: Recipe, side: Literal["rollout", "trainer"], linears: Sequence[str]
) -> tuple[str, ...]:
    """List the linears that one side of a recipe quantizes, in model order.

    Raises:
        UserError: as `quantized_layers`.
    """
    chosen = quantized_layers(recipe, linears)
    return tuple(x for x in chosen if getattr(recipe.of_linear(x), side).weight.quantized)


def why_in_compute(recipe: Recipe, linear: str, layers: int) -> str:
    """Name the field that keeps a linear from being quantized; "" where nothing does.

    Such as "first_layers_in_compute = 1", or "excluded: layers.3.*", of a model of `layers` layers.
    """
    if not recipe.quantizes_linears:
        return "no linear is quantized"
    first, last = _ends(recipe, layers)
    if _layer(linear) < first:
        return f"first_layers_in_compute = {recipe.first_layers_in_compute:g}"
    if _layer(linear) >= layers - last:
        return f"last_layers_in_compute = {recipe.last_layers_in_compute:g}"
    if not any(fnmatchcase(linear, pattern) for pattern in recipe.quantized):
        return "in no pattern of quantized"
    if by := next((pattern for pattern in recipe.excluded if fnmatchcase(linear, pattern)), ""):
        return f"excluded: {by}"
    if not recipe.of_linear(linear).quantizes_linears:
        return "in the compute dtype by recipe.layers"
    return ""


def _ends(recipe: Recipe, layers: int) -> tuple[int, int]:
    """How many of a model's first and last layers are not quantized."""
    ends = recipe.first_layers_in_compute, recipe.last_layers_in_compute
    first, last = (int(x if x >= 1 else x * layers + 0.5) for x in ends)
    return first, last


def _layer(linear: str) -> int:
    return int(linear.split(".")[1])

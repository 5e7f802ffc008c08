"""Number formats and what this version can do with them."""

from __future__ import annotations

import jax.numpy as jnp

from fp8rl_jax.config.recipe import ForwardFormats, Recipe, TensorFormat
from fp8rl_jax.errors import UserError

ELEMENT_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def element_dtype(fmt: TensorFormat) -> jnp.dtype:
    """Dtype of the stored values. Raises UserError for a format that has no storage yet."""
    if fmt.format not in ELEMENT_DTYPES:
        raise UserError(f"format {fmt.format!r} cannot be stored (supported: {', '.join(ELEMENT_DTYPES)})")
    return jnp.dtype(ELEMENT_DTYPES[fmt.format])


def max_value(fmt: TensorFormat) -> float:
    """Largest finite value: 448 for e4m3, 57344 for e5m2."""
    return float(jnp.finfo(element_dtype(fmt)).max)


def check_recipe(recipe: Recipe) -> None:
    """Refuses what the recipe names and this version cannot compute, so that no field is a silent no-op.

    Raises:
        UserError: naming the recipe's field.
    """

    def refuse(field: str, why: str) -> None:
        raise UserError(f"recipe {recipe.name!r}: {field} {why}")

    for side in ("rollout", "trainer"):
        formats: ForwardFormats = getattr(recipe, side)
        for role, fmt in vars(formats).items():
            if fmt.quantized and fmt.format not in ELEMENT_DTYPES:
                refuse(f"{side}.{role}.format", f"{fmt.format!r} is not supported")
            if fmt.rounding != "nearest" or fmt.transform != "none":
                refuse(f"{side}.{role}", "asks for a rounding or transform other than nearest / none, which is not supported")
        if formats.activation.quantized and not formats.weight.quantized:
            refuse(f"{side}.activation", "is quantized but the weight is not; no product takes that pair")
        if formats.weight.quantized and formats.weight.block is None:
            refuse(f"{side}.weight.block", "must be given: weights are quantized in blocks")
        if formats.activation.quantized and formats.activation.block != (1, (formats.weight.block or (0, 0))[1]):
            refuse(
                f"{side}.activation.block", f"must be (1, {formats.weight.block[1]}), the weight's block along the contraction"
            )
        if formats.key.format != formats.value.format:
            refuse(f"{side}.value", "and key must have the same format: the cache has one dtype")
        for role in ("query", "key", "value"):
            fmt = getattr(formats, role)
            if fmt.quantized and (fmt.block is not None or fmt.scale != "float32"):
                refuse(f"{side}.{role}", "must have one float32 scale for the whole tensor, no block and no other scale rule")
        if formats.query.quantized and not formats.key.quantized:
            refuse(f"{side}.query", "is quantized but the cache is not")
        if formats.probability.quantized:
            refuse(f"{side}.probability", "cannot be quantized: softmax and PV run in float32")
    trainer = vars(recipe.trainer).items()
    for name, fmt in [(f"trainer.{role}", fmt) for role, fmt in trainer] + [
        (role, getattr(recipe, role)) for role in ("output_gradient", "saved_activation", "optimizer_moment")
    ]:
        if fmt.quantized:
            refuse(name, "is quantized, and the trainer computes in the compute dtype only")
    if recipe.trained != "all":
        refuse("trained", f"{recipe.trained!r} is not supported")
    if recipe.exact:
        refuse("exact", "is not supported: no backend has an exact path yet")

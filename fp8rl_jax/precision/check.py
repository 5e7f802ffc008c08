"""What this version can compute of the formats that a recipe names."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import self_test
from fp8rl_jax.config.formats import WHOLE, TensorFormat, block_text
from fp8rl_jax.config.recipe import STATE_ROLES, ForwardFormats, Recipe, TrainerFormats
from fp8rl_jax.config.schema import quoted
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision.formats import (
    element_dtype,
    format_of,
    has,
    in_blocks,
    of_weights_alone,
)
from fp8rl_jax.precision.formats.drawn import Drawn
from fp8rl_jax.precision.formats.fp4 import ClampedFP4
from fp8rl_jax.precision.quantizer import round_through
from pallas_kernels import Format, invariant
from pallas_kernels.attention import PROBABILITY_FACTOR
from pallas_kernels.backend import Backend, BackendError, check_pair, platform
from pallas_kernels.matmul import selected_backend


def check_recipe(recipe: Recipe, backend: Backend = "auto") -> None:
    """Refuse what a recipe names and this version cannot compute, on this machine.

    Its kernels are tried first where nobody has tried them yet (fp8rl_jax/self_test.py).

    Raises:
        UserError: as `check_formats`; or a backend asked for by name is not right here.
    """
    self_test.confirm(backend)
    check_formats(recipe, backend)


def check_formats(recipe: Recipe, backend: Backend = "auto") -> None:
    """Refuse what a recipe names and this version cannot compute.

    No field is a silent no-op.

    Args:
        backend: kernels of the quantized products.

    Raises:
        UserError: naming the recipe's field; where no kernel multiplies two formats also both of
            them and the backend; or the backend that the recipe needs is not there.
    """
    if recipe.weight_gradient_estimator != "straight_through" and not recipe.quantizes("trainer"):
        raise UserError(
            f"recipe {recipe.name!r}: weight_gradient_estimator is of a trainer's quantized "
            "weights, and there are none"
        )
    for variant, rule in zip(recipe.variants, (None, *recipe.layers), strict=True):
        _check(variant, backend, f"layers.{quoted(rule.pattern)}: " if rule else "")
    _check_state(recipe)


def _check_state(recipe: Recipe) -> None:
    """What a training state is kept in against what the formats can do."""
    drawn = {
        "master": (recipe.master_rounding, "quantize_stochastic"),
        "second_moment": (recipe.second_moment_rounding, "store"),
    }
    for role in STATE_ROLES:
        fmt: TensorFormat = getattr(recipe, role)
        if in_blocks(fmt):
            continue
        rounding, name = drawn.get(role, ("nearest", ""))
        if fmt.scale != "float32":
            raise UserError(
                f"recipe {recipe.name!r}: {role}.scale is not of {fmt.element}, which has a rule "
                "of its own"
            )
        if rounding == "stochastic" and not has(fmt, getattr(Format, name)):
            raise UserError(
                f"recipe {recipe.name!r}: {role} = {fmt.element!r}: the format has no `{name}`; "
                f'set {role}_rounding = "nearest", or take another format'
            )


def _check(recipe: Recipe, backend: Backend, prefix: str) -> None:
    """`check_formats` of formats that are the same in every linear."""

    def refuse(field: str, why: str) -> None:
        raise UserError(f"recipe {recipe.name!r}: {prefix}{field} {why}")

    _check_roles(recipe, refuse)
    for side in ("rollout", "trainer"):
        formats: TrainerFormats = getattr(recipe, side)
        if formats.activation.quantized and not formats.weight.quantized:
            refuse(
                f"{side}.activation",
                "is quantized but the weight is not; no product takes that pair",
            )
        for role in ("weight", "activation"):
            _check_scale(getattr(formats, role), f"{side}.{role}", refuse)
        _check_activation(formats, side, refuse)
    served = recipe.rollout.activation
    if served.quantized and _clamps(served) and not format_of(served, (1, 1)).by_row:
        refuse(
            "rollout.activation",
            f"is {served.name}, whose bounds are quantiles of all tokens of a batch: a token would "
            "depend on those that come after it; take fp4_clamped, a token's own",
        )
    if recipe.weight_gradient_estimator == "differentiable" and recipe.trainer.weight.quantized:
        weight = format_of(recipe.trainer.weight, (1, 1))
        if not (isinstance(weight, Drawn) and weight.is_e2m1):
            refuse(
                "weight_gradient_estimator",
                f'must be "straight_through": {recipe.trainer.weight.name} is not e2m1, whose '
                "steps the other one knows",
            )
    _check_heads(recipe.rollout, refuse)
    for side in ("rollout", "trainer"):
        _check_probability(
            getattr(recipe, side).probability, f"{side}.probability", backend, refuse
        )
    if recipe.weight_source == "master" and recipe.rollout.weight != recipe.trainer.weight:
        refuse(
            "weight_source",
            '"master" is for weights of one format on both sides: here one of them sees the master '
            "rounded to the compute dtype, and the other one something else (XTuner #2044); use "
            '"compute", with model.dither',
        )
    if recipe.quantizes_cache:
        rule = (recipe.kv_margin, *(recipe.kv_constants or (1, 1, 1)))
        if len(rule) != 4 or not all(0 < number < math.inf for number in rule):
            refuse(
                "kv_constants", "must be three positive numbers, for Q, K and V, and kv_margin one"
            )
        if recipe.kv_prompts < 0:
            refuse("kv_prompts", f"must be at least 0, and is {recipe.kv_prompts}")
        if recipe.kv_prompts and recipe.kv_calibration != "trainer":
            refuse(
                "kv_prompts",
                'is of kv_calibration = "trainer" alone; set that, too, or kv_prompts to 0',
            )
        if not 0 <= recipe.kv_percentile <= 100:
            refuse("kv_percentile", f"must be from 0 to 100, and is {recipe.kv_percentile}")
    _check_backward(recipe, refuse)
    try:
        chosen = selected_backend(backend)
        if recipe.exact:
            invariant.check_available(backend)
    except BackendError as error:
        raise UserError(f"precision.backend: {error}") from None
    if recipe.quantizes_linears:
        _check_products(recipe, chosen, refuse)
        if backend == "hopper":
            _check_blocks(recipe, refuse)
    if recipe.exact and platform() == "tpu":
        refuse(
            "exact",
            "cannot be promised: its sums are made in float64, which a TPU has not; set "
            "precision.exact = false",
        )
    if recipe.exact and (difference := _first_difference(recipe)):
        refuse(
            "exact",
            f"cannot be promised: {difference}; the rollout's graph must be part of the "
            "trainer's forward",
        )
    if recipe.exact and recipe.trainer.probability.quantized and chosen == "hopper":
        refuse(
            "exact",
            "cannot be promised: probabilities are cast by the reference alone, and here kernels "
            'attend; set precision.backend = "reference"',
        )
    if recipe.exact and backend == "auto" and (wrong := self_test.refused()):
        refuse(
            "exact",
            f"cannot be promised: its kernels belong together, and {', '.join(wrong)} did not pass "
            'the self-test (`fp8rl doctor`); set precision.backend = "reference"',
        )
    if recipe.exact and _ties_tokens(recipe):
        refuse(
            "exact",
            f"cannot be promised: a scale of {describe(recipe.rollout.activation)} is shared by "
            "the tokens of a batch; take a format whose scales are a row's own",
        )


def _check_roles(recipe: Recipe, refuse: Callable[[str, str], None]) -> None:
    """What is of weights alone or of activations alone, in roles of other tensors."""
    formats = {f"rollout.{role}": fmt for role, fmt in recipe.rollout.roles().items()}
    formats |= {f"trainer.{role}": fmt for role, fmt in recipe.trainer.roles().items()}
    formats |= {role: recipe.format_of(role) for role in ("output_gradient", "saved_activation")}
    for field, fmt in formats.items():
        if of_weights_alone(fmt) and not field.endswith(".weight"):
            refuse(field, f'cannot be {fmt.name}, which is of weights alone; use "compute"')
        others = field.endswith(".weight") or field == "output_gradient"
        if others and fmt.quantized and _clamps(fmt):
            refuse(field, f"is of activations alone: {fmt.name} clamps outliers; use fp4")


def _check_activation(
    formats: TrainerFormats, side: str, refuse: Callable[[str, str], None]
) -> None:
    """The groups of an activation against the weight's along the contraction."""
    weight, activation = formats.weight, formats.activation
    if not activation.quantized:
        return
    if in_blocks(weight) and in_blocks(activation):
        columns = weight.block[1] if weight.block else WHOLE
        fits = [(1, columns), *([None] if columns == WHOLE else [])]
        if activation.block not in fits:
            refuse(
                f"{side}.activation.block",
                f"must be {block_text((1, columns))}, the weight's block along the contraction",
            )


def _clamps(fmt: TensorFormat) -> bool:
    return isinstance(format_of(fmt, (1, 1)), ClampedFP4)


def _ties_tokens(recipe: Recipe) -> bool:
    """Whether an activation's bits depend on the other tokens of its batch."""
    return any(
        fmt.quantized and (fmt.block is None or not format_of(fmt, (1, 1)).by_row)
        for variant in recipe.variants
        for fmt in (variant.rollout.activation, variant.trainer.activation)
    )


def _check_heads(formats: ForwardFormats, refuse: Callable[[str, str], None]) -> None:
    """The formats of queries, keys and values: all stored with calibrated scales, or all rounded
    through a format that finds its scales in each token's head."""
    heads = {role: formats.roles()[role] for role in ("query", "key", "value")}
    calibrated = [role for role, fmt in heads.items() if fmt.calibrated]
    if calibrated and formats.key.element != formats.value.element:
        refuse("rollout.value", "and key must have the same element: the cache has one dtype")
    for role, fmt in heads.items():
        if not fmt.quantized:
            continue
        if calibrated and (not fmt.calibrated or fmt.scale != "float32"):
            other = "" if fmt.calibrated else f", as rollout.{calibrated[0]} has"
            refuse(
                f"rollout.{role}",
                "must have one float32 scale for the whole tensor, no block and no other scale "
                f"rule{other}",
            )
        if not calibrated:
            _check_scale(fmt, f"rollout.{role}", refuse)
            if _couples_rows(fmt):
                refuse(
                    f"rollout.{role}",
                    f"is {fmt.name}, whose scales reach over several rows; it must treat each "
                    "token's head by itself, or what is cached would depend on the batch: take "
                    "one whose scales are a row's own, such as nvfp4_rows or mxfp8",
                )
    if formats.query.quantized and not formats.key.quantized:
        refuse("rollout.query", "is quantized but the cache is not: keys have no format")


@cache
def _couples_rows(fmt: TensorFormat) -> bool:
    """Whether what a format makes of a row depends on other rows of the tensor. One that says that
    it does not is tried out: `Format.by_row` is its block's unless it says otherwise."""
    made = format_of(fmt, (2, 2))
    if not made.by_row or in_blocks(fmt):
        return not made.by_row
    sizes = np.array([[1.0, 2.0**40], [2.0**-20, 3.0]])[..., None]
    x = np.random.default_rng(0).normal(size=(2, 2, 2 * (made.block[1] or 16))) * sizes
    with jax.ensure_compile_time_eval():  # a recipe may be checked while a program is traced
        x = jnp.asarray(x, jnp.float32)
        together = np.asarray(round_through(x, fmt))
        alone = [round_through(x[i : i + 1, j : j + 1], fmt) for i in (0, 1) for j in (0, 1)]
        alone = np.concatenate([np.asarray(row) for row in alone]).reshape(together.shape)
    return not np.allclose(together, alone, rtol=1e-5, atol=0)


def _check_probability(
    fmt: TensorFormat, field: str, backend: Backend, refuse: Callable[[str, str], None]
) -> None:
    """The format of attention's probabilities: an element type that holds 256."""
    if not fmt.quantized:
        return
    if not in_blocks(fmt):
        refuse(
            field,
            f"cannot be {fmt.name}: groups of keys, prefix and padding among them, are not the "
            "query's own; use e4m3 or e5m2",
        )
    if fmt.block is not None or fmt.scale != "float32":
        refuse(
            field,
            f"must be an element type alone, such as {fmt.element}: its one factor is 256",
        )
    if fmt.element_type.largest < PROBABILITY_FACTOR:
        refuse(
            field,
            f"is {fmt.element}, which ends at {fmt.element_type.largest:g}: probabilities are cast "
            f"times {PROBABILITY_FACTOR:g}; use e4m3 or e5m2",
        )
    if backend in ("cpu", "hopper"):
        refuse(
            field,
            f'is cast by the reference alone, and precision.backend = "{backend}" asks for '
            "kernels, whose probabilities are not cast so; use auto or reference",
        )


def _check_scale(fmt: TensorFormat, field: str, refuse: Callable[[str, str], None]) -> None:
    if fmt.quantized and not in_blocks(fmt) and fmt.scale != "float32":
        refuse(f"{field}.scale", f"is not of {fmt.element}, which has a rule of its own")


def describe(fmt: TensorFormat) -> str:
    """Describe a format, such as "e4m3 128x128 float32 scales".

    One that quantizes nothing is "compute dtype".
    """
    if not fmt.quantized:
        return "compute dtype"
    if fmt.block is None:
        return f"{fmt.element} one scale"
    if not in_blocks(fmt):
        return f"{fmt.element} {block_text(fmt.block)}"
    return f"{fmt.element} {block_text(fmt.block)} {fmt.scale} scales"


def unlike_sides(recipe: Recipe) -> str:
    """Describe what both sides quantize and not alike; "" where there is nothing.

    Such as "weight: e4m3 128x128 power_of_two scales in the rollout, e4m3 128x128 float32 scales in
    the trainer".
    """
    pairs = (
        (role, fmt, variant.trainer.roles()[role])
        for variant in recipe.variants
        for role, fmt in variant.rollout.roles().items()
    )
    found = (
        f"{role}: {describe(one)} in the rollout, {describe(other)} in the trainer"
        for role, one, other in pairs
        if one.quantized and other.quantized and one != other
    )
    return "; ".join(dict.fromkeys(found))


def promises_exact(recipe: Recipe, backend: Backend = "auto") -> bool:
    """Whether exact mode is right and costs nothing here: both sides have the same formats, and the
    reference runs on one CPU device, without probabilities that no kernel casts. No Hopper GPU has
    confirmed its kernels yet."""
    cheap = selected_backend(backend) == "reference" and invariant.is_available("reference")
    cheap = cheap and not recipe.trainer.probability.quantized
    return cheap and not any(map(_first_difference, recipe.variants)) and not _ties_tokens(recipe)


def _first_difference(recipe: Recipe) -> str:
    """The first role whose format differs between the recipe's sides; "" where the forward passes
    are one."""
    for role, fmt in recipe.rollout.roles().items():
        other = recipe.trainer.roles()[role]
        if fmt != other:
            field = next(name for name, value in vars(fmt).items() if value != getattr(other, name))
            return (
                f"the rollout's {role} has {field} {getattr(fmt, field)!r} and the trainer's "
                f"{getattr(other, field)!r}"
            )
    return ""


def _check_products(recipe: Recipe, backend: str, refuse: Callable[[str, str], None]) -> None:
    """Every product of two quantized operands against what the backend multiplies; a weight alone
    is unpacked before."""
    rollout, trainer, gradient = recipe.rollout, recipe.trainer, recipe.output_gradient
    products = (
        ("rollout.activation", rollout.activation, "rollout.weight", rollout.weight),
        ("trainer.activation", trainer.activation, "trainer.weight", trainer.weight),
        ("output_gradient", gradient, "trainer.weight", trainer.weight),
        ("output_gradient", gradient, "trainer.activation", trainer.activation),
    )
    for left, one, right, other in products:
        if not (one.quantized and other.quantized):
            continue
        own = next((fmt for fmt in (one, other) if not in_blocks(fmt)), None)
        if own is not None and backend == "hopper":
            refuse(left, f"is multiplied by {right}, and no kernel takes {own.name}")
        if own is None:
            try:
                check_pair(
                    f"{one.element} is multiplied by {right} {other.element}",
                    backend,
                    *map(element_dtype, (one, other)),
                )
            except BackendError as error:
                refuse(left, str(error))


def _check_blocks(recipe: Recipe, refuse: Callable[[str, str], None]) -> None:
    """Blocks against those that the kernels, asked for by name, multiply; under "auto" the
    reference takes the others."""
    for side in ("rollout", "trainer"):
        fmt: TensorFormat = getattr(recipe, side).weight
        if fmt.quantized and fmt.block != (128, 128):
            block = block_text(fmt.block or (WHOLE, WHOLE))
            refuse(
                f"{side}.weight.block",
                f"is {block}, and the hopper backend has 128x128; use auto",
            )


def _check_backward(recipe: Recipe, refuse: Callable[[str, str], None]) -> None:
    """The formats of the backward pass against those of the trainer's forward."""
    weight, activation = recipe.trainer.weight, recipe.trainer.activation
    gradient, saved = recipe.output_gradient, recipe.saved_activation
    if not weight.quantized:
        for role, fmt in (("output_gradient", gradient), ("saved_activation", saved)):
            if fmt.quantized:
                refuse(role, "is quantized, but the trainer's linears are not")
        return
    if not activation.quantized:
        for role, fmt in (("output_gradient", gradient), ("saved_activation", saved)):
            if fmt.quantized:
                refuse(
                    role,
                    "is quantized, but trainer.activation is not: where the weight alone is "
                    "quantized, its gradient is computed in the compute dtype",
                )
        return
    if saved.quantized and saved != activation:
        refuse(
            "saved_activation",
            "must be the format of trainer.activation: what the forward has quantized is what is "
            "kept",
        )
    _check_scale(gradient, "output_gradient", refuse)
    if not gradient.quantized:
        return
    columns = weight.block[1] if weight.block else WHOLE
    fits = [(1, columns), *([None] if weight.block is None else [])]
    if in_blocks(weight) and in_blocks(gradient) and gradient.block not in fits:
        refuse(
            "output_gradient.block",
            f"must be {block_text((1, columns))}: the backward reads trainer.weight, in blocks of "
            f"{block_text(weight.block or (WHOLE, WHOLE))}, the other way",
        )
    if recipe.gradient_rounding == "stochastic" and not has(gradient, Format.quantize_stochastic):
        refuse(
            "gradient_rounding", f'must be "nearest": {gradient.name} has no stochastic rounding'
        )

"""Calls of objectives, advantage estimators and importance weights, built in or the user's.

Each is a function of (inputs, config): `TokenInputs`, `RewardInputs` or `RatioInputs`, and the part
of the configuration that it belongs to. A function of the user's may take keyword arguments
besides, which the configuration holds. It is traced with the step that calls it, once for each
spec, each set of arguments and each shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault, load_once


def call(
    key: str,
    name: str,
    built_in: Mapping[str, Callable[..., Any]],
    inputs: Any,
    config: Any,
    arguments: Mapping[str, float],
) -> Any:
    """Call the function that the configuration names.

    Args:
        key: configuration key of the function, for messages.
        name: of a built-in function, or the spec of another.
        built_in: functions by name.
        inputs: what it computes from.
        config: the part of the configuration that the key stands in.
        arguments: keyword arguments of a function that is not built in.

    Raises:
        UserError: the function does not import, does not take these arguments, or raises an
            exception.
    """
    if name in built_in:
        return built_in[name](inputs, config)
    function = load_once(name, key)
    try:
        inspect.signature(function).bind(inputs, config, **arguments)
    except TypeError as fault:
        wanted = ", ".join(["inputs", "config", *(f"{argument}=..." for argument in arguments)])
        raise UserError(f"{key} = {name!r} cannot be called with ({wanted}): {fault}") from fault
    # a function without a signature, of an extension module: the call itself will say
    except ValueError:
        pass
    try:
        return function(inputs, config, **arguments)
    except UserError:
        raise
    except Exception as fault:
        code = getattr(inspect.unwrap(function), "__code__", None)
        raise UserError(
            f"{key} = {name!r}: {describe_fault(fault, code.co_filename if code else '')}"
        ) from fault


def floats(
    key: str, name: str, values: Any, shape: tuple[int, ...], axes: str
) -> Float[Array, "*shape"]:
    """Check what a function returned, and give it as float32.

    Args:
        key: configuration key of the function.
        name: its name or spec.
        values: what it returned.
        shape: that the values must have.
        axes: the shape in letters, for the message.

    Raises:
        UserError: the values are no array of floating-point numbers, or their shape is another one.
    """
    if not (is_array(values, shape) and jnp.issubdtype(values.dtype, jnp.floating)):
        wanted = f"floating-point numbers {axes}, here {list(shape)}"
        raise UserError(f"{key} = {name!r} must return {wanted}, and returned {summarize(values)}")
    return jnp.asarray(values, jnp.float32)


def is_array(values: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether `values` is an array of this shape."""
    return isinstance(values, jax.Array | np.ndarray) and values.shape == shape


def summarize(values: Any) -> str:
    """Name dtype and shape of an array, or the type of anything else, for a message."""
    if isinstance(values, jax.Array | np.ndarray):
        return f"{values.dtype} {list(values.shape)}"
    return type(values).__name__

"""Calls of objectives, advantage estimators and importance weights, built in or the user's.

Each is a function of (inputs, config): `TokenInputs`, `RewardInputs` or `RatioInputs`, and the part
of the configuration that it belongs to. A function of the user's may take keyword arguments
besides, which the configuration holds. It is traced with the step that calls it, once for each
spec, each set of arguments and each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fp8rl_jax import functions
from fp8rl_jax.errors import UserError


def call(
    key: str,
    name: str,
    built_in: Mapping[str, Callable[..., Any]],
    inputs: Any,
    config: Any,
    arguments: Mapping[str, float],
) -> Any:
    """Call the function that the configuration names, with (inputs, config) and `arguments`; as
    `functions.call`."""
    given = {"inputs": inputs, "config": config}
    return functions.call(key, name, built_in, given, arguments)


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

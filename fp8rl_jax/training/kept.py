"""How a training state keeps a tensor between updates: in a dtype as it is, or in a format.

Masters, gradients and moments are computed with in float32 and kept in what the recipe says of
their role (recipe.STATE_ROLES). A format with scales is of matrices, and of stacks of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fp8rl_jax.config.formats import FLOAT32, TensorFormat
from fp8rl_jax.config.recipe import GradientRounding
from fp8rl_jax.precision import Blocks, QTensor, format_of
from pallas_kernels.quantize import expand_scales
from pallas_kernels.rounding import round_stochastic, rounded

Kept = Array | QTensor


def store(
    x: Float[Array, "*axes"],
    fmt: TensorFormat,
    key: Key[Array, ""],
    rounding: GradientRounding = "nearest",
    divides: bool = False,
) -> Kept:
    """Bring a tensor into the form that it is kept in.

    Args:
        x: float32.
        fmt: of its role, as `format_for` gives it.
        key: of the draws, where `rounding` is "stochastic".
        divides: `x` is not negative and an update divides by its root: what is rounded
            stochastically does not become 0 (`Format.store`).
    """
    stochastic = rounding == "stochastic"
    if fmt.scale == "none":
        dtype = jnp.dtype(fmt.element_type.dtype)
        return (
            round_stochastic(x, dtype, key)
            if stochastic and dtype != x.dtype
            else rounded(x, dtype)
        )
    made = format_of(fmt, x.shape)
    if not stochastic:
        return made.quantize(x)
    if divides:
        return made.store(x, key)
    if not isinstance(made, Blocks):
        return made.quantize_stochastic(x, jax.random.bits(key))
    q = made.quantize(x)
    limit = float(jnp.finfo(q.values.dtype).max)
    steps = jnp.clip(x * expand_scales(1.0 / q.scales, q.block, x.shape[-2:]), -limit, limit)
    return replace(q, values=round_stochastic(steps, q.values.dtype, key))


def load(kept: Kept) -> Float[Array, "*axes"]:
    """Compute with what is kept: float32."""
    return kept.dequantize() if isinstance(kept, QTensor) else kept.astype(jnp.float32)


def is_kept(x: Any) -> bool:
    """Whether a node of a tree is one tensor in a format: where `jax.tree` is to stop."""
    return isinstance(x, QTensor)


def is_float32(x: Kept) -> bool:
    """Whether a tensor is kept as it is computed with."""
    return not isinstance(x, QTensor) and x.dtype == jnp.float32


def loaded(tree: Any) -> Any:
    """`load` every tensor of a tree; float32 ones stay the arrays that they are."""
    return jax.tree.map(load, tree, is_leaf=is_kept)


def leaves(tree: Any) -> list[Kept]:
    """List the tensors of a tree."""
    return jax.tree.leaves(tree, is_leaf=is_kept)


def format_for(fmt: TensorFormat, matrix: bool) -> TensorFormat:
    """The format of a role for one tensor: norms and biases stay in float32 where the others have
    scales."""
    return fmt if matrix or fmt.scale == "none" else FLOAT32


def matrices(tree: Any) -> Iterator[bool]:
    """Say of each tensor of a tree, in order, whether it is a matrix or a stack of them: a stack of
    norms has two axes, and is none."""

    def is_weight(node: Any) -> bool:
        return hasattr(node, "axes") and hasattr(node, "weight")

    for node in jax.tree.leaves(tree, is_leaf=lambda x: is_weight(x) or is_kept(x)):
        sides = [axis for axis in node.axes if axis != "layers"] if is_weight(node) else node.shape
        for _ in leaves(node):
            yield len(sides) >= 2

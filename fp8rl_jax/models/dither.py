"""Masters that begin anywhere in the cells of what they are served as, and not in the middle.

A checkpoint's weights lie on the grid of the dtype or of the format that it was written in. Where
both sides round a master to that very grid, it may be any of the numbers that round to its weight:
the first policy is the same bit for bit, and an update arrives in the mean from its first step.

    cell                           where
    of the compute dtype           bfloat16 and float16, all that both sides round to it
    of a quantized weight format   linears that both sides have in that format, of a checkpoint that
                                   was quantized in it
    what lies in one of both       linears that both sides quantize straight from the float32
                                   master, of a checkpoint in bfloat16

A side that has a linear in the compute dtype sees all of a master. There the second kind of cell
would make another policy of it, and the linear keeps to the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fp8rl_jax.config.formats import WHOLE, TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.forms import linear_formats
from fp8rl_jax.models.policy import Policy, build_policy, tensor_specs
from fp8rl_jax.models.tensors import of_kind
from fp8rl_jax.parallel import to_host
from fp8rl_jax.precision import Format, quantize
from fp8rl_jax.precision.formats import has, in_blocks
from fp8rl_jax.precision.rounding import dither, dither_blocks, dither_inside, on_grid

_DITHER = 3
"""What the key of a seed is for; 0 to 2 are training, samples and adapters."""

# jitted by themselves, so that tensors of one shape are compiled once
_dither = jax.jit(dither, static_argnums=1)
_dither_blocks = jax.jit(dither_blocks, static_argnums=(1, 2))
_dither_inside = jax.jit(dither_inside, static_argnums=1)


def dithered(policy: Policy, recipe: Recipe, seed: int, dtype: jnp.dtype) -> Policy:
    """Move every weight at random among the numbers that are served alike, so that both forms of
    the policy (models.forms) are what they were.

    The router stays, which is served in float32; so does what lies between two numbers of its grid.

    Args:
        policy: float32 masters, layers stacked.
        recipe: with weights rounded to nearest.
        seed: of the draws, which follow a tensor's place and not its sharding.
        dtype: compute dtype.
    """
    weights: dict[str, Any] = {
        name: getattr(policy, name) for name in ("embed_tokens", "norm", "lm_head")
    }
    weights |= {f"layers.{name}": weight for name, weight in policy.stack.tensors().items()}
    names = list(tensor_specs(policy.config))
    formats = _formats(policy, recipe)

    def moved(name: str, *_: Any) -> Array:
        value = weights[name].value
        if name.removeprefix("layers.") in of_kind("router"):
            return value
        salt = np.random.SeedSequence([seed, _DITHER, names.index(name)]).generate_state(1)[0]
        made = value if dtype == jnp.float32 else _dither(value, dtype, salt)
        of_layers = formats.get(name.removeprefix("layers."), [])
        for fmt in dict.fromkeys(filter(None, of_layers)):
            source = jnp.dtype(jnp.float32) if recipe.weight_source == "master" else dtype
            here = np.reshape([own == fmt for own in of_layers], (-1,) + (1,) * (value.ndim - 1))
            first, drawn = _first_block(value, of_layers.index(fmt), fmt), made
            if _block_on_grid(first, fmt):
                begin = value if source == jnp.float32 else made
                drawn = _dither_blocks(begin, fmt, source, salt)
            elif source == jnp.float32:
                of_bfloat16 = (first.astype(jnp.bfloat16).astype(first.dtype) == first).all()
                drawn = _dither_inside(value, fmt, salt) if of_bfloat16 else value
            made = jnp.where(here, drawn, made)
        return made

    return build_policy(policy.config, moved)


def _formats(policy: Policy, recipe: Recipe) -> dict[str, list[TensorFormat | None]]:
    """Of each linear, for each entry of its stack: the format of its weight on both sides."""
    rollout, trainer = (
        linear_formats(policy.config, recipe, side) for side in ("rollout", "trainer")
    )
    return {
        name: [
            one.weight
            if one and other and one.weight == other.weight and _has_cells(one.weight)
            else None
            for one, other in zip(rollout[name], trainer[name], strict=True)
        ]
        for name in rollout.keys() & trainer.keys()
    }


def _has_cells(fmt: TensorFormat) -> bool:
    """Whether a format's numbers are drawn from their cells: its blocks have a size, and the first
    one says whether a checkpoint is in it."""
    if fmt.block is None or WHOLE in fmt.block:
        return False
    return in_blocks(fmt) or has(fmt, Format.dithered)


def _first_block(value: Array, entry: int, fmt: TensorFormat) -> np.ndarray:
    """An entry's first block, which says for all of them whether a checkpoint is on a grid."""
    assert fmt.block is not None
    first = to_host(_corner(value, entry, fmt.block))
    # of one shape whatever the tensor's, so that it is compiled once
    sides = zip(fmt.block, first.shape, strict=True)
    return np.pad(first, [(0, side - size) for side, size in sides])


@partial(jax.jit, static_argnums=2)
def _corner(value: Array, entry: int, block: tuple[int, int]) -> Array:
    matrix = value[entry].reshape(-1, *value.shape[-2:])[0]
    return matrix[: block[0], : block[1]]


@partial(jax.jit, static_argnums=1)
def _block_on_grid(block: Array, fmt: TensorFormat) -> Array:
    return on_grid(block, quantize(block, fmt, "reference")).all()

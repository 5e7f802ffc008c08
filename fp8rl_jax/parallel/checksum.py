"""Checksums of arrays: computed where the arrays lie, the same on any mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32


def checksums(tree: Any) -> UInt32[Array, "leaves 2"]:
    """Compute two 32-bit sums of the mixed bits of every array.

    They are the same on any mesh: integer sums have no order. One changed element always changes
    both; other damage is missed once in 2^64. There is a program for each shape and not one for the
    tree: a state has few shapes, and other states have the same.
    """
    leaves = jax.tree.leaves(tree)
    return _stacked([_two(x) for x in leaves]) if leaves else jnp.zeros((0, 2), jnp.uint32)


def marks(tree: Any) -> UInt32[Array, " leaves"]:
    """Compute one 32-bit sum of every array, for a look whether it is still what it was.

    Two or four narrow numbers make a word, which takes half or a quarter of the time. One changed
    word always changes the sum; other damage is missed once in 2^32.
    """
    return jnp.stack([_sum(_packed(x), 1) for x in jax.tree.leaves(tree)])


@jax.jit
def _two(x: Array) -> UInt32[Array, " 2"]:
    words = _words(x)
    return jnp.stack([_sum(words, 1), _sum(words, 2)])


_stacked = jax.jit(jnp.stack)


def _packed(x: Array) -> Array:
    each = 4 // x.dtype.itemsize
    if each < 2 or x.dtype == jnp.bool_ or not x.ndim or x.shape[-1] % each:
        return _words(x)
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, each), jnp.uint32)


def _words(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)


@partial(jax.jit, static_argnums=1)  # so that arrays of one shape are traced once
def _sum(words: Array, start: int) -> Array:
    return jnp.sum(mixed(words ^ place_hash(words.shape, start)), dtype=jnp.uint32)


def place_hash(shape: tuple[int, ...], start: int | Array) -> UInt32[Array, "*shape"]:
    """Hash the place of every element: 32 bits that look random, the same on any mesh.

    Args:
        start: another one gives other bits.
    """
    place = jnp.asarray(start, jnp.uint32)
    # not a flat index: tensors stay sharded, and may have more than 2^32 elements
    for size in shape:
        # once for each place on the axes so far, and not again for each element behind it
        place = lax.optimization_barrier(place[..., None])
        place = mixed(place + jnp.arange(size, dtype=jnp.uint32))
    return place


def mixed(x: Array) -> Array:
    """MurmurHash3's finalizer: a bijection of 32-bit words in which every bit moves every other."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

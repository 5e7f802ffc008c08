"""Shared memory and barriers of the chunk kernel, and how many slots of keys fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.decode_attention.tiles import CONSUMERS, ROWS, STEP, Sizes


class Memory(NamedTuple):
    """Shared memory and barriers: a ring of keys and values a consumer, two slots of queries, and
    what consumers write."""

    keys: Any
    values: Any
    queries: Any
    limits: Any
    weights: Any
    wide: Any
    sums: Any
    stats: Any
    full: Any
    empty: Any
    asked: Any
    answered: Any
    free: Any
    handed: Any


def memory_of(at: Sizes, query, key, value, limits: int) -> tuple[Memory, int]:
    """Shared memory of a launch, and the slots of each consumer's ring: what the rest leaves, 6 at
    most.

    Args:
        query, key, value: dtypes.
        limits: how many each query has, of the keys that it sees.
    """
    dim, weight = at.head_dim, jnp.float16 if jnp.dtype(value).itemsize == 1 else value
    wide = weight != value
    shapes = {
        "queries": ((2, ROWS, dim), query),
        "weights": ((CONSUMERS, STEP, STEP), weight, dim),
        "wide": ((CONSUMERS, STEP, dim), weight) if wide else None,
        "sums": ((ROWS, dim), jnp.float32),
    }
    fixed = sum(_bytes(*shape) for shape in shapes.values() if shape)
    stages = min(
        6,
        (mosaic.SMEM_BYTES - 6144 - fixed)
        // (CONSUMERS * (_bytes((STEP, dim), key) + _bytes((STEP, dim), value))),
    )
    slots = CONSUMERS * stages
    tiles = {name: mosaic.tiled(*shape) if shape else None for name, shape in shapes.items()}
    return (
        Memory(
            keys=mosaic.tiled((slots, STEP, dim), key),
            values=mosaic.tiled((slots, STEP, dim), value),
            limits=tuple(mosaic.SMEM((2, ROWS), jnp.int32) for _ in range(limits)),
            stats=mosaic.SMEM((2, ROWS), jnp.float32),
            full=mosaic.Barrier(num_arrivals=2, num_barriers=slots),
            empty=mosaic.Barrier(num_barriers=slots),
            asked=mosaic.Barrier(num_arrivals=1 + limits, num_barriers=2),
            answered=mosaic.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            free=mosaic.Barrier(),
            handed=mosaic.Barrier(),
            **tiles,
        ),
        stages,
    )


def _bytes(shape, dtype, _like=0):
    size = jnp.dtype(dtype).itemsize
    for side in shape:
        size *= side
    return size

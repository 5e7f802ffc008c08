"""An update's batch with less padding: cut to the widths that its rows need, or packed. Both leave
loss and metrics as they are.

A rollout is as wide as the longest prompt and completion may be, so that one program samples every
batch. The update can be narrower: widths are powers of two and three quarters of them, and each
width met for the first time compiles the update once. The widths follow from lengths that all
processes read together, so they agree on the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.parallel import batch_sharding, batch_shards, to_global, to_host
from fp8rl_jax.training.packing import bucket, pack
from fp8rl_jax.training.step import Batch

_OF_PROMPTS = ("prompts", "prompt_routes")


class Compact(NamedTuple):
    """batch: to run on; padding: the part of the token slots that the model runs on which hold no
    token, or one more copy of a prompt's."""

    batch: Batch
    padding: float


def compact(batch: Batch, config: TrainerConfig, parts: int, mesh: jax.sharding.Mesh) -> Compact:
    """The batch as trainer.packing and trainer.length_buckets want it; all processes must call it
    together.

    Args:
        batch: on the mesh.
        parts: micro-batches of the whole batch, which are packed apart.
    """
    lengths = to_host((batch.lengths, jnp.sum(batch.present, axis=1)))
    prompts, completions = (np.asarray(x, np.int64) for x in lengths)
    tokens = int(prompts.sum() + completions.sum())
    if config.length_buckets:
        batch = cut(batch, int(prompts.max()), int(completions.max()))
    sides = batch.prompts.shape[1], batch.tokens.shape[1]
    slots = batch.prompts.size + batch.tokens.size
    if config.packing:
        width = config.pack_tokens or sum(sides)
        packing = pack(prompts, completions, sides, width, parts=parts, devices=batch_shards(mesh))
        slots = packing.tokens.size
        batch = replace(batch, packing=to_global(packing, batch_sharding(mesh)))
    return Compact(batch, 1.0 - tokens / slots)


def cut(batch: Batch, prompt: int, completion: int) -> Batch:
    """The batch without the columns behind the bucket of its longest prompt and that of its longest
    completion."""

    def narrow(name: str, x: Array | None):
        if name == "packing" or x is None or x.ndim < 2:
            return x
        return x[:, : bucket(max(prompt if name in _OF_PROMPTS else completion, 1), 2)]

    return replace(
        batch, **{name: narrow(name, getattr(batch, name)) for name in batch.__dataclass_fields__}
    )


def widen(values: Float[Array, "b cut"], width: int) -> Float[Array, "b t"]:
    """Values of a cut batch in the width that it had, 0 behind."""
    return jnp.pad(values, ((0, 0), (0, width - values.shape[1])))


def of_width(config: RLConfig, width: int) -> RLConfig:
    """`config` for batches that may be cut: where it divides by the width of the batch, by
    `width`."""
    if config.aggregation != "fixed_length" or config.fixed_length is not None:
        return config
    return replace(config, fixed_length=width)

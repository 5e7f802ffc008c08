"""Rules of which samples teach, as anyone would write them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def best_and_worst(inputs, config, *, weight=1.0):
    """Of each prompt the two samples of largest and smallest advantage, pairs of large ones more
    often: Shuffle-R1's way (arXiv 2508.05612), as many lines as there are prompts."""
    best, worst = inputs.advantages.argmax(axis=1), inputs.advantages.argmin(axis=1)
    prompts = jnp.arange(len(best))
    rows = jnp.stack([best, worst], axis=1) + inputs.advantages.shape[1] * prompts[:, None]
    size = jnp.abs(
        jnp.take_along_axis(inputs.advantages, rows % inputs.advantages.shape[1], axis=1)
    )
    drawn = jax.random.choice(inputs.key, prompts, prompts.shape, p=size.sum(1) + 1e-6)
    return rows[drawn], jnp.full(rows.shape, weight)


def longest_first(inputs, config):
    """Every sample behind a prompt of its own, in the order of length."""
    return jnp.argsort(-inputs.lengths.reshape(-1), stable=True)


def across_prompts(inputs, config):
    return jnp.arange(inputs.valid.size).reshape(inputs.valid.shape[::-1])


def beyond(inputs, config):
    return jnp.arange(inputs.valid.size).reshape(inputs.valid.shape) + 1


def no_rows(inputs, config):
    return inputs.advantages


def other_weights(inputs, config):
    return jnp.arange(4), jnp.ones(3)


def odd(inputs, config):
    return jnp.arange(3)

"""Partial rollouts: completions that one step begins and another ends.

The longest completions of a step are what the others wait for. With more prompts in progress than a
step learns from, it ends as soon as enough of them have all their completions; the rest is carried
over, prefilled again under the next weights, and goes on from where it was (Kimi k1.5,
arXiv 2501.12599, section 2.6; APRIL, arXiv 2509.18521). A completion then has tokens of several
weights. Each keeps the log-probability with which it was sampled, so the rollout correction weighs
it as it does every other, and the version of the weights that sampled it.

Everything here is numpy on the host, the same on every process. On a mesh a shard of the batch has
its own share of the prompts, those carried over first.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Int, UInt32

from fp8rl_jax.parallel import split_batch
from fp8rl_jax.rollout.paged.state import ACTIVE, DONE, EVICTED, Rows, new_rows
from fp8rl_jax.rollout.sampler import Prompts, Rollout, row_keys, rows_of
from fp8rl_jax.rollout.sampling import Sampling

_key_data = jax.jit(lambda *given: jax.random.key_data(row_keys(*given)), static_argnums=2)


class InProgress(NamedTuple):
    """Completions that have begun or will, B = P * n, row b of prompt b // n.

    Attributes:
        prompts: P of them.
        keys: of each row, which fixes its draws; words of the PRNG keys.
        rows: what they have; `status` says which have ended.
        versions: of the weights that sampled each token.
    """

    prompts: Prompts
    keys: UInt32[np.ndarray, "b words"]
    rows: Rows
    versions: Int[np.ndarray, "b t"]

    @property
    def samples(self) -> int:
        """n."""
        return len(self.keys) // len(self.prompts.lengths)


def begin(
    prompts: Prompts, key: jax.Array, samples: int, sampling: Sampling, pad: int
) -> InProgress:
    """Begin `samples` completions of each prompt.

    Args:
        prompts: on the host.
        key: of a rollout; the draws of a row are those of `sampler.generate` with it.
        pad: token id of the padding.
    """
    keys = np.asarray(_key_data(key, np.asarray(prompts.ids), samples))
    rows = jax.tree.map(np.asarray, new_rows(len(keys), sampling, pad))
    return InProgress(prompts, keys, rows, np.zeros(rows.tokens.shape, np.int32))


def join(first: InProgress, second: InProgress, shards: int) -> InProgress:
    """Put the completions of two together, shard by shard of the batch.

    Raises:
        ValueError: they differ in samples, or in the width of prompts or completions.
    """
    shapes = [(x.samples, x.prompts.tokens.shape[1], x.versions.shape[1]) for x in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "samples of a prompt and tokens of prompts and completions: "
            f"{shapes[0]} of those carried over, {shapes[1]} of the new ones"
        )

    def joined(one, other):
        both = np.concatenate([split_batch(one, shards), split_batch(other, shards)], axis=1)
        return both.reshape(-1, *one.shape[1:])

    return jax.tree.map(joined, first, second)


def advance(before: InProgress, rows: Rows, version: int) -> InProgress:
    """Take over what `paged.go_on` sampled with weights of a version."""
    new = np.arange(rows.tokens.shape[1]) >= before.rows.count[:, None]
    status: Any = np.where(rows.status == ACTIVE, EVICTED, rows.status)
    return before._replace(
        rows=rows._replace(status=status), versions=np.where(new, version, before.versions)
    )


def divide(progress: InProgress, count: int, shards: int) -> tuple[InProgress, InProgress]:
    """Divide into `count` prompts that have all their completions, the first ones, and the rest.

    Raises:
        ValueError: a shard of the batch has fewer.
    """
    done: Any = progress.rows.status == DONE
    whole = split_batch(done.reshape(-1, progress.samples).all(1), shards)
    count, size = count // shards, whole.shape[1]
    if (whole.sum(1) < count).any():
        raise ValueError(f"a shard of the batch has fewer than {count} prompts that are complete")
    order = np.argsort(~whole, axis=1, kind="stable") + size * np.arange(shards)[:, None]
    return _picked(progress, order[:, :count]), _picked(progress, order[:, count:])


def as_rollout(progress: InProgress, version: int, metrics: dict[str, Array]) -> Rollout:
    """Make the rollout of completions that have all ended.

    Args:
        version: of the weights that served last.
        metrics: rollout/* of the engine.

    Returns:
        Numpy arrays; also rollout/stale_tokens, the share that older weights sampled, and
        rollout/oldest_token, by how many versions the oldest is behind.
    """
    rows, versions = progress.rows, cast(Any, progress.versions)
    mask: Any = np.arange(rows.tokens.shape[1]) < rows.count[:, None]
    behind = (version - versions)[mask]
    stale: dict[str, Any] = {
        "rollout/stale_tokens": (behind > 0).mean(),
        "rollout/oldest_token": behind.max(),
    }
    return Rollout(
        prompts=progress.prompts,
        tokens=rows.tokens,
        mask=mask,
        behaviour_logprobs=rows.behaviour_logprobs,
        policy_logprobs=rows.policy_logprobs,
        stopped=rows.stopped,
        weight_version=version,
        token_versions=versions,
        support=rows.support,
        metrics=metrics | stale,
    )


def _picked(progress: InProgress, chosen: Int[np.ndarray, "shards count"]) -> InProgress:
    """The prompts of these numbers, and their rows."""
    chosen = chosen.reshape(-1)
    rows = rows_of(chosen, progress.samples)
    prompts = Prompts(*(x[chosen] for x in progress.prompts))
    return InProgress(prompts, *jax.tree.map(lambda x: x[rows], tuple(progress[1:])))

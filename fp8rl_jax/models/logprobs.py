"""Log-probabilities of given tokens without ever holding [batch, length, vocab].

The output head is applied to a few positions at a time; the backward pass recomputes those logits
instead of keeping them. Where all logits are few, one pass makes and keeps them: a fourth of the
head's products less. On a mesh each device scores its own rows: the head is gathered once, and its
gradient added up once, however many parts there are.

With sampling replay (DeepSeek-V3.2, arXiv 2512.02556, "keep sampling mask") the softmax is over
each token's support S, what truncated sampling could have drawn there, and not over the vocabulary:
log p(x) = z[x] / T - log sum over s in S of exp(z[s] / T). So a policy that is compared with itself
has ratio 1, where the full vocabulary would give the probability that truncation kept.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import splitting_axes
from fp8rl_jax.precision import Compute

KEPT_LOGITS = 2**26
"""Logits of a batch that are kept for the backward pass, at most: 256 MiB in float32."""


class Support(NamedTuple):
    """The tokens that truncated sampling could have drawn, K of them at most, for each token.

    Attributes:
        ids: int32, the likeliest first; behind `count` of them it holds an id once more, any one
            of the support.
        count: int32, what top-k, top-p and min-p kept: more than K where the sampler drew from the
            K likeliest of these alone, 0 where nothing was sampled.
    """

    ids: Int[Array, "*b k"]
    count: Int[Array, "*b"]

    @property
    def valid(self) -> Bool[Array, "*b k"]:
        """Where `ids` are of the support; the first one always, so that a softmax is finite."""
        return jnp.arange(self.ids.shape[-1]) < jnp.maximum(self.count, 1)[..., None]


def positions_at_once(rows: int, length: int, vocab: int, chunk: int) -> int:
    """Count the positions of each row whose logits exist at one time.

    All of them where they are at most `chunk` tokens with at most `KEPT_LOGITS` logits; else at
    most half.
    """
    if rows * length <= chunk and rows * length * vocab <= KEPT_LOGITS:
        return length
    return max(1, min(chunk // rows, length // 2))


def token_logprobs(
    hidden: Float[Array, "b t hidden"],
    policy: Policy,
    targets: Int[Array, "b t"],
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
    support: Support | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Compute log softmax(hidden @ head.T / temperature)[targets], and that distribution's entropy.

    Args:
        hidden: hidden states that predict `targets` (already shifted by the caller), any float
            dtype.
        policy: its output head, and how it computes.
        targets: token ids.
        temperature: the logits are divided by it.
        chunk: tokens of a device whose logits exist at one time (`positions_at_once`).
        entropy_gradient: let gradients flow through the entropies, for an entropy bonus; it costs a
            pass over the logits.
        support: of each token [b, t, k], over which the softmax is; default: the vocabulary.

    Returns:
        (log-probabilities, entropies in nats), float32 [b, t]; as `scores` where a target is not
        in its support.
    """
    compute = policy.compute

    def score(head, temperature, hidden, targets, support):
        logits = compute.product(hidden, head)
        return scores(compute, logits, targets, temperature, support, entropy_gradient)

    run = partial(_in_parts, score, chunk)
    if axes := splitting_axes(len(hidden)):
        whole, rows = PartitionSpec(), PartitionSpec(axes)
        specs = (whole, whole, rows, rows, rows)
        run = jax.shard_map(
            run, in_specs=specs, out_specs=rows, axis_names=set(axes), check_vma=False
        )
    return run(policy.head, jnp.asarray(temperature, jnp.float32), hidden, targets, support)


def _in_parts(score, chunk: int, head, temperature, hidden, targets, support):
    """`score` of a device's rows, some positions of each at a time."""
    b, t, _ = hidden.shape
    width = positions_at_once(b, t, head.shape[0], chunk)
    count = -(-t // width)
    padding = count * width - t
    if count == 1:
        return score(head, temperature, hidden, targets, support)
    recomputed = jax.checkpoint(score)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, count, width, *x.shape[2:]), 1, 0)

    parts = jax.tree.map(split, (hidden, targets, support))
    _, (logprobs, entropy) = lax.scan(
        lambda _, xs: (None, recomputed(head, temperature, *xs)), None, parts
    )

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(b, count * width)[:, :t]

    return joined(logprobs), joined(entropy)


def scores(
    compute: Compute,
    logits: Float[Array, "*b vocab"],
    targets: Int[Array, "*b"],
    temperature: float | Float[Array, ""],
    support: Support | None = None,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Compute log-probabilities and entropies of `token_logprobs` from logits.

    Returns:
        Both, float32; NaN log-probabilities where a target is not in its support. Where a support's
        count is 0 nothing was sampled, and they mean nothing.
    """
    valid = inside = None
    if support is not None:
        # the softmax of the support's logits alone, in the sampler's order on both sides
        logits = jnp.take_along_axis(logits, support.ids, axis=-1)
        valid = support.valid
        found = (support.ids == targets[..., None]) & valid
        targets, inside = found.argmax(-1), found.any(-1) | (support.count == 0)
    inputs = compute, logits, targets, temperature, valid
    found = _scores_forward(*inputs)[0] if entropy_gradient else _scores(*inputs)
    return found if inside is None else (jnp.where(inside, found[0], jnp.nan), found[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
    compute: Compute,
    logits: Float[Array, "*b n"],
    targets: Int[Array, "*b"],
    temperature: float | Float[Array, ""],
    valid: Bool[Array, "*b n"] | None,
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Log-probabilities and entropies; a gradient comes from the former alone."""
    return _scores_forward(compute, logits, targets, temperature, valid)[0]


def _scores_forward(compute: Compute, logits, targets, temperature, valid):
    shifted, weights = compute.softmax_terms(logits, temperature)
    if valid is not None:
        weights = jnp.where(valid, weights, 0.0)
    total = compute.row_sum(weights)
    logprob = compute.logprob_of(shifted, total, targets)
    mean = (weights * shifted).sum(-1, keepdims=True) / total
    found = logprob, (jnp.log(total) - mean)[..., 0]
    return found, (weights, total, targets, temperature)


def _scores_backward(_, saved, cotangents):
    """d logprob / d logits = (1 at the target - probabilities) / temperature."""
    weights, total, targets, temperature = saved
    chosen = targets[..., None] == lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    factor = cotangents[0][..., None] / temperature
    return jnp.where(chosen, factor, 0.0) - weights * (factor / total), None, None, None


_scores.defvjp(_scores_forward, _scores_backward)

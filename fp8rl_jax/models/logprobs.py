"""Log-probabilities of given tokens without ever holding [batch, length, vocab].

The output head is applied to a few positions at a time; the backward pass recomputes those logits
instead of keeping them. Where all logits are few, one pass makes and keeps them: a fourth of the
head's products less.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.policy import Policy
from fp8rl_jax.precision import Compute

KEPT_LOGITS = 2**26
"""Logits of a batch that are kept for the backward pass, at most: 256 MiB in float32."""


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
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Compute log softmax(hidden @ head.T / temperature)[targets], and that distribution's entropy.

    Args:
        hidden: hidden states that predict `targets` (already shifted by the caller), any float
            dtype.
        policy: its output head, and how it computes.
        targets: token ids.
        temperature: the logits are divided by it.
        chunk: tokens whose logits exist at one time (`positions_at_once`).
        entropy_gradient: let gradients flow through the entropies, for an entropy bonus; it costs a
            pass over the logits.

    Returns:
        (log-probabilities, entropies in nats), float32 [b, t].
    """
    head, compute = policy.head, policy.compute
    b, t, _ = hidden.shape
    width = positions_at_once(b, t, head.shape[0], chunk)
    count = -(-t // width)
    padding = count * width - t

    def score(head, hidden, targets):
        inputs = compute, compute.product(hidden, head), targets, temperature
        return _scores_forward(*inputs)[0] if entropy_gradient else _scores(*inputs)

    if count == 1:
        return score(head, hidden, targets)
    recomputed = jax.checkpoint(score)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, count, width, *x.shape[2:]), 1, 0)

    _, (logprobs, entropy) = lax.scan(
        lambda _, xs: (None, recomputed(head, *xs)), None, (split(hidden), split(targets))
    )

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(b, count * width)[:, :t]

    return joined(logprobs), joined(entropy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
    compute: Compute,
    logits: Float[Array, "b t vocab"],
    targets: Int[Array, "b t"],
    temperature: float | Float[Array, ""],
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Log-probabilities and entropies; a gradient comes from the former alone."""
    return _scores_forward(compute, logits, targets, temperature)[0]


def _scores_forward(compute: Compute, logits, targets, temperature):
    shifted, weights = compute.softmax_terms(logits, temperature)
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
    return jnp.where(chosen, factor, 0.0) - weights * (factor / total), None, None


_scores.defvjp(_scores_forward, _scores_backward)

"""Log-probabilities of given tokens without ever holding [batch, length, vocab].

The output head is applied to a few positions at a time; the backward pass recomputes those logits
instead of keeping them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.policy import Policy


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
        chunk: tokens whose logits exist at one time; positions are split so that at most half of
            `t` is ever in one chunk.
        entropy_gradient: let gradients flow through the entropies, for an entropy bonus; it costs a
            pass over the logits.

    Returns:
        (log-probabilities, entropies in nats), float32 [b, t].
    """
    head, compute = policy.head, policy.compute
    b, t, _ = hidden.shape
    width = max(1, min(chunk // b, t // 2))
    count = -(-t // width)
    padding = count * width - t

    @jax.checkpoint
    def score(head, hidden, targets):
        shifted, weights = compute.softmax_terms(compute.product(hidden, head), temperature)
        total = compute.row_sum(weights)
        logprob = compute.logprob_of(shifted, total, targets)
        if not entropy_gradient:
            shifted, weights, total = lax.stop_gradient((shifted, weights, total))
        mean = (weights * shifted).sum(-1, keepdims=True) / total
        return logprob, (jnp.log(total) - mean)[..., 0]

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, count, width, *x.shape[2:]), 1, 0)

    _, (logprobs, entropy) = lax.scan(
        lambda _, xs: (None, score(head, *xs)), None, (split(hidden), split(targets))
    )

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(b, count * width)[:, :t]

    return joined(logprobs), joined(entropy)

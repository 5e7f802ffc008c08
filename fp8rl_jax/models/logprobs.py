"""Log-probabilities of given tokens without ever holding [batch, length, vocab].

The output head is applied to a few positions at a time; the backward pass recomputes those logits
instead of keeping them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.arithmetic import arithmetic


def token_logprobs(
    hidden: Float[Array, "b t hidden"],
    head: Float[Array, "vocab hidden"],
    targets: Int[Array, "b t"],
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
    exact: bool = False,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """log softmax(hidden @ head.T / temperature)[targets], and the entropy of that distribution.

    Args:
        hidden: hidden states that predict `targets` (already shifted by the caller), any float
            dtype.
        head: output embedding, [vocab, hidden].
        targets: token ids.
        temperature: the logits are divided by it.
        chunk: tokens whose logits exist at one time; positions are split so that at most half of
            `t` is ever in one chunk.
        entropy_gradient: let gradients flow through the entropies, for an entropy bonus; it costs a
            pass over the logits.
        exact: a token's log-probability depends on its own hidden state alone, bit for bit.

    Returns:
        (log-probabilities, entropies in nats), float32 [b, t].
    """
    b, t, _ = hidden.shape
    width = max(1, min(chunk // b, t // 2))
    count = -(-t // width)
    padding = count * width - t
    numbers = arithmetic(exact)

    @jax.checkpoint
    def score(head, hidden, targets):
        product = numbers.dot(hidden, head)
        logits = product / temperature
        shifted = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
        normalizer = jnp.log(jnp.exp(shifted).sum(-1))
        chosen = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
        seen, total = (
            (shifted, normalizer) if entropy_gradient else lax.stop_gradient((shifted, normalizer))
        )
        weights = jnp.exp(seen)
        logprob = numbers.logprob(product, targets, temperature) if exact else chosen - normalizer
        return logprob, total - (weights * seen).sum(-1) / weights.sum(-1)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, count, width, *x.shape[2:]), 1, 0)

    _, (logprobs, entropy) = lax.scan(
        lambda _, xs: (None, score(head, *xs)), None, (split(hidden), split(targets))
    )
    return tuple(
        jnp.moveaxis(z, 0, 1).reshape(b, count * width)[:, :t] for z in (logprobs, entropy)
    )

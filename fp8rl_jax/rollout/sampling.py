"""Drawing a token, with the two log-probabilities that reinforcement learning needs.

`behaviour` belongs to the distribution that was sampled: tempered, truncated, renormalized. `policy` has the same temperature
over the whole vocabulary: it is what the trainer computes, so mismatch and importance ratios use it. They differ as soon as
top-k, top-p or min-p is on (top-p 0.8 makes the mean ratio of the first about 0.9).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

_BLOCK = 128


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        max_new_tokens: longest completion, stop token included.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (ties at the edge are all kept); 0 keeps all.
        top_p: then keep the smallest set of tokens whose probability reaches top_p; 1 keeps all.
        min_p: then drop tokens less likely than min_p times the most likely; 0 drops none.
        stop_token_ids: each ends the completion that it is sampled in.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def draw(
    logits: Float[Array, "b vocab"], keys: Key[Array, " b"], sampling: Sampling
) -> tuple[Int[Array, " b"], Float[Array, " b"], Float[Array, " b"]]:
    """One token a row.

    Args:
        logits: float32.
        keys: one PRNG key a row; a row's draw depends on its own key and logits only.
        sampling: temperature and truncation.

    Returns:
        (tokens, behaviour log-probabilities, policy log-probabilities). Greedy rows have behaviour 0 and the policy's
        log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
        return tokens, jnp.zeros(tokens.shape, jnp.float32), _logprob(logits, tokens)
    logits = logits / sampling.temperature
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    kept = jnp.where(truncation_mask(weights, sampling), weights, 0.0) if sampling.truncated else weights
    tokens = jax.vmap(_inverse_cdf)(kept, keys)
    chosen = jnp.log(jnp.take_along_axis(weights, tokens[:, None], axis=-1)[:, 0])
    policy = chosen - jnp.log(weights.sum(-1))
    behaviour = chosen - jnp.log(kept.sum(-1)) if sampling.truncated else policy
    return tokens, behaviour, policy


def truncation_mask(weights: Float[Array, "b vocab"], sampling: Sampling) -> Bool[Array, "b vocab"]:
    """Tokens that top-k, then top-p, then min-p keep; each acts on what the one before left, as in Hugging Face.

    Args:
        weights: unnormalized probabilities, >= 0.
    """
    keep = jnp.ones(weights.shape, bool)
    if sampling.top_k > 0:
        k = min(sampling.top_k, weights.shape[-1])
        keep = weights >= jax.lax.top_k(weights, k)[0][:, -1:]
    if sampling.top_p < 1.0:
        left = jnp.where(keep, weights, 0.0)
        ordered = -jnp.sort(-left, axis=-1)
        before = jnp.cumsum(ordered, axis=-1) - ordered
        inside = before < sampling.top_p * ordered.sum(-1, keepdims=True)
        keep = keep & (left >= jnp.where(inside, ordered, jnp.inf).min(-1, keepdims=True))
    if sampling.min_p > 0.0:
        keep = keep & (weights >= sampling.min_p * weights.max(-1, keepdims=True))
    return keep


def _logprob(logits, tokens):
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=-1)[:, 0]


def _inverse_cdf(weights: Float[Array, " vocab"], key: Key[Array, ""]) -> Int[Array, ""]:
    """Index drawn in proportion to `weights`: a block of 128 first, then a token in it.

    Two uniform numbers instead of one a token (Gumbel noise), and a resolution of 2^-23 in each stage.
    """
    size = weights.shape[0]
    blocks = jnp.pad(weights, (0, -size % _BLOCK)).reshape(-1, _BLOCK)
    u_block, u_token = jax.random.uniform(key, (2,))
    block = _search(blocks.sum(-1), u_block)
    return block * _BLOCK + _search(blocks[block], u_token)


def _search(weights, u):
    total, positive = jnp.cumsum(weights), weights > 0
    # a parallel cumsum may round up across a zero weight, or never pass u * total: neither may choose that weight
    beyond = positive & (total > u * total[-1])
    last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
    return jnp.where(beyond.any(), jnp.argmax(beyond), last).astype(jnp.int32)

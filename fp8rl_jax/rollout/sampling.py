"""Drawing a token, with the two log-probabilities that reinforcement learning needs.

`behaviour` belongs to the distribution that was sampled: biased, without what is banned, divided by
the temperature, truncated, renormalized. `policy` has the same temperature over the whole
vocabulary: it is what the trainer computes, so mismatch and importance ratios use it. They differ
as soon as top-k, top-p, min-p, bad words or a logit bias is on (top-p 0.8 makes the mean ratio of
the first about 0.9). Or the sampler keeps each token's support, over which the trainer then
renormalizes, too (sampling replay, models/logprobs.py): then both sides have the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.models.logprobs import Support, scores
from fp8rl_jax.precision import Compute
from fp8rl_jax.rollout.constraints import Phrases

PhraseStates = tuple[Any, ...]
"""Where each row is in stop strings and in bad words, int32 [b] each, None where there are none."""

_BLOCK = 128
_STATIC = [
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids"),
    "support_size",
]


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=_STATIC,
    data_fields=["stop_strings", "bad_words", "logit_bias"],
)
@dataclass(frozen=True)
class Sampling:
    """How completions are drawn: numbers that a program is compiled for, and tables that it takes
    as arguments.

    Attributes:
        max_new_tokens: longest completion, stop token included.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (ties at the edge are all kept); 0 keeps all.
        top_p: then keep the smallest set of tokens whose probability reaches top_p; 1 keeps all.
        min_p: then drop tokens less likely than min_p times the most likely; 0 drops none.
        stop_token_ids: each ends the completion that it is sampled in.
        stop_strings: table of texts; the token in which one is complete ends the completion.
        bad_words: table of texts; a token that would complete one is not sampled.
        logit_bias: float32, added to the logits before the temperature.
        support_size: where tokens are left out, keep what is left of each token's, and draw from
            this many of the likeliest at most, no more than there are tokens; 0 keeps none.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: Phrases | None = None
    bad_words: Phrases | None = None
    logit_bias: Float[Array, " vocab"] | None = None
    support_size: int = 0

    @property
    def truncated(self) -> bool:
        """Whether top-k, top-p or min-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def keeps_support(self) -> bool:
        """Whether each token's support is kept; of greedy and of whole distributions there is
        none."""
        return self.support_size > 0 and self.truncated and self.temperature > 0

    def at_start(self, rows: int) -> PhraseStates:
        """Make the states of rows without a token."""
        tables = self.stop_strings, self.bad_words
        return tuple(None if table is None else jnp.zeros(rows, jnp.int32) for table in tables)

    def banned(self, states: PhraseStates) -> Bool[Array, "b vocab"] | None:
        """Find the tokens that would complete a bad word."""
        return None if self.bad_words is None else self.bad_words.completing(states[1])

    def read(
        self, tokens: Int[Array, " b"], states: PhraseStates
    ) -> tuple[Bool[Array, " b"], PhraseStates]:
        """Find the rows that these tokens end, and the states behind them."""
        stopped, (stop, bad) = jnp.zeros(tokens.shape, bool), states
        if self.stop_token_ids:
            stopped = jnp.isin(tokens, jnp.asarray(self.stop_token_ids, jnp.int32))
        if self.stop_strings is not None:
            stop, complete = self.stop_strings.step(stop, tokens)
            stopped |= complete
        if self.bad_words is not None:
            bad, _ = self.bad_words.step(bad, tokens)
        return stopped, (stop, bad)

    def no_support(self, rows: int) -> Support | None:
        """Make the supports of rows without a token; None where none are kept."""
        if not self.keeps_support:
            return None
        shape = rows, self.max_new_tokens
        return Support(
            jnp.zeros((*shape, self.support_size), jnp.int32), jnp.zeros(shape, jnp.int32)
        )


def at_temperature(sampling: Sampling, temperature: float) -> Sampling:
    """Change the temperature of a sampling, which is then neither truncated nor biased.

    It ends where `sampling` does.
    """
    return Sampling(
        sampling.max_new_tokens,
        temperature,
        stop_token_ids=sampling.stop_token_ids,
        stop_strings=sampling.stop_strings,
    )


class Drawn(NamedTuple):
    """One token a row.

    Attributes:
        tokens: int32.
        behaviour_logprobs: of the distribution that was sampled; 0 of greedy rows.
        policy_logprobs: same temperature, whole vocabulary; of greedy rows at temperature 1.
        support: what could have been drawn; None where it is not kept.
    """

    tokens: Int[Array, " b"]
    behaviour_logprobs: Float[Array, " b"]
    policy_logprobs: Float[Array, " b"]
    support: Support | None


def draw(
    logits: Float[Array, "b vocab"],
    keys: Key[Array, " b"],
    sampling: Sampling,
    banned: Bool[Array, "b vocab"] | None = None,
    compute: Compute | None = None,
) -> Drawn:
    """Draw one token a row, with its behaviour and policy log-probabilities.

    Args:
        logits: float32.
        keys: one PRNG key a row; a row's draw depends on its own key and logits only.
        sampling: temperature, bias and truncation.
        banned: tokens that must not be drawn, not all of a row.
        compute: of the policy.
    """
    compute = compute or Compute()
    adjusted = logits if sampling.logit_bias is None else logits + sampling.logit_bias
    if banned is not None:
        adjusted = jnp.where(banned, -jnp.inf, adjusted)
    if sampling.temperature == 0:
        tokens = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
        policy = compute.logprob(logits, tokens, 1.0)
        return Drawn(tokens, jnp.zeros(tokens.shape, jnp.float32), policy, None)
    shifted, weights = compute.softmax_terms(adjusted, sampling.temperature)
    kept, support = weights, None
    if sampling.truncated:
        kept = jnp.where(truncation_mask(weights, sampling), weights, 0.0)
    if sampling.keeps_support:
        kept, support = _likeliest(kept, sampling.support_size)
    tokens = jax.vmap(_inverse_cdf)(kept, keys)
    untruncated = policy = compute.logprob_of(shifted, compute.row_sum(weights), tokens)
    if adjusted is not logits:
        policy = compute.logprob(logits, tokens, sampling.temperature)
    behaviour = untruncated
    if support is not None:  # as the trainer computes it
        behaviour, _ = scores(compute, adjusted, tokens, sampling.temperature, support)
    elif sampling.truncated:
        behaviour = compute.logprob_of(shifted, compute.row_sum(kept), tokens)
    return Drawn(tokens, behaviour, policy, support)


def truncation_mask(weights: Float[Array, "b vocab"], sampling: Sampling) -> Bool[Array, "b vocab"]:
    """Find the tokens that top-k, then top-p, then min-p keep.

    Each acts on what the one before left, as in Hugging Face.

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


def _likeliest(
    weights: Float[Array, "b vocab"], size: int
) -> tuple[Float[Array, "b vocab"], Support]:
    """Keep the `size` largest weights of each row; the others become 0."""
    largest, ids = lax.top_k(weights, size)
    rows = jnp.arange(len(weights))[:, None]
    kept = jnp.zeros_like(weights).at[rows, ids].set(largest)
    count = (weights > 0).sum(-1, dtype=jnp.int32)
    return kept, Support(jnp.where(largest > 0, ids, ids[:, :1]), count)


def _inverse_cdf(weights: Float[Array, " vocab"], key: Key[Array, ""]) -> Int[Array, ""]:
    """Index drawn in proportion to `weights`: a block of 128 first, then a token in it.

    Two uniform numbers instead of one a token (Gumbel noise), and a resolution of 2^-23 in each
    stage. Where the vocabulary is split over devices, each has whole blocks of it, as many: what
    they exchange are the sums of the blocks, and the block that is drawn.
    """
    unit = _BLOCK * jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    blocks = jnp.pad(weights, (0, -len(weights) % unit)).reshape(-1, _BLOCK)
    u_block, u_token = jax.random.uniform(key, (2,))
    block = _search(blocks.sum(-1), u_block)
    return block * _BLOCK + _search(blocks[block], u_token)


def _search(weights, u):
    total, positive = jnp.cumsum(weights), weights > 0
    # a parallel cumsum may round up across a zero weight, or never pass u * total: neither may
    # choose that weight
    beyond = positive & (total > u * total[-1])
    last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
    return jnp.where(beyond.any(), jnp.argmax(beyond), last).astype(jnp.int32)

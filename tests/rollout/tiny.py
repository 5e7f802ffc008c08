"""A small policy with decided opinions, its rollout form, and scoring by one full forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine, Prompts, pad_prompts
from fp8rl_jax.rollout.sync import SyncContext

# no side is a multiple of 128
CONFIG = PolicyConfig("qwen3", 131, 192, 320, 2, 4, 2, 32, pad_token_id=0)
VOCAB = CONFIG.vocab_size
WIDTH = 9


def make_policy(seed: int = 0):
    """Random weights, scaled so that the logits spread over several nats."""
    policy = init_policy(CONFIG, jax.random.key(seed))
    return jax.tree.map(
        lambda x: x * 4.0 if x.ndim > 1 and x.shape[-1] > 32 and x.std() > 0 else x, policy
    )


def make_prompts(lengths=(9, 4, 1), ids=(7, 3, 11), seed: int = 0) -> Prompts:
    rng = np.random.default_rng(seed)
    return pad_prompts([rng.integers(1, VOCAB, n).tolist() for n in lengths], list(ids), WIDTH)


def make_engine(
    name: str = "bf16", unroll: bool = True, policy=None, *, made=LocalEngine, backend="auto"
) -> LocalEngine:
    """Synced, float32 compute; scales calibrated on a fixed batch where the recipe wants them."""
    engine = made(RECIPES[name], jnp.float32, unroll, backend)
    policy = make_policy() if policy is None else policy
    scales = calibrate_on_prompts(policy, make_prompts(seed=5), engine.recipe, jnp.float32)
    engine.sync(policy, SyncContext(scales=scales))
    return engine


def full_logits(policy, rollout) -> np.ndarray:
    """[b, t, vocab] float64 logits that predict the completion tokens: prompt and completion as one
    row, no cache.

    policy: in either side's form; or an engine, for what it serves.
    """
    policy = getattr(policy, "policy", policy)
    tokens, lengths = np.asarray(rollout.tokens), np.asarray(rollout.prompts.lengths)
    rows, width = tokens.shape
    n = rows // len(lengths)
    joined = np.zeros((rows, rollout.prompts.tokens.shape[1] + width), np.int32)
    for b in range(rows):
        start = lengths[b // n]
        joined[b, :start] = rollout.prompts.tokens[b // n, :start]
        joined[b, start : start + width] = tokens[b]
    hidden = _hidden(policy, joined)
    logits = np.asarray(hidden, np.float64) @ np.asarray(policy.head, np.float64).T
    return np.stack(
        [logits[b, lengths[b // n] - 1 : lengths[b // n] - 1 + width] for b in range(rows)]
    )


@jax.jit
def _hidden(policy, tokens):
    return forward(policy, tokens, keep_cache=False).hidden


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def take(table, tokens) -> np.ndarray:
    return np.take_along_axis(table, np.asarray(tokens)[..., None], -1)[..., 0]


def hugging_face_mask(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Tokens that transformers' warpers keep, in its order: temperature, top-k, top-p, min-p; rows
    one by one, float64."""
    keep = np.ones(np.shape(logits), bool)
    for index in np.ndindex(*np.shape(logits)[:-1]):
        row = np.asarray(logits[index], np.float64) / temperature
        if top_k:
            row = np.where(row < np.sort(row)[-min(top_k, len(row))], -np.inf, row)
        if top_p < 1:
            order = np.argsort(row)
            removed = np.cumsum(np.exp(log_softmax(row))[order]) <= 1 - top_p
            removed[-1] = False
            row[order[removed]] = -np.inf
        if min_p:
            p = np.exp(log_softmax(row))
            row = np.where(p < min_p * p.max(), -np.inf, row)
        keep[index] = np.isfinite(row)
    return keep

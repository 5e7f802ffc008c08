"""Draws against their distribution, and truncation against the Hugging Face rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import VOCAB, hugging_face_mask, log_softmax, take

from fp8rl_jax.rollout.sampling import Sampling, _search, draw, truncation_mask

SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 10},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]
ROWS = 20_000


@pytest.fixture(scope="module")
def logits():
    """131 tokens: one block of 128 and a remainder that holds the likeliest of all."""
    row = np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)
    row[130] = row.max() + 0.2
    return row


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_and_logprobs(logits, settings):
    sampling = Sampling(**settings)
    keys = jax.random.split(jax.random.key(1), ROWS)
    tokens, behaviour, policy = jax.jit(draw, static_argnums=2)(
        jnp.tile(logits, (ROWS, 1)), keys, sampling
    )
    tokens = np.asarray(tokens)
    keep = hugging_face_mask(logits, **settings)
    assert keep[tokens].all()  # never a truncated token
    tempered = logits.astype(np.float64) / sampling.temperature
    expected = log_softmax(np.where(keep, tempered, -np.inf))
    np.testing.assert_allclose(policy, log_softmax(tempered)[tokens], atol=1e-5)
    np.testing.assert_allclose(behaviour, expected[tokens], atol=1e-5)
    counts, mean = np.bincount(tokens, minlength=VOCAB), ROWS * np.exp(expected)
    # chi-square over the cells with enough expected counts, the others pooled
    big = mean >= 10
    observed, wanted = counts[big], mean[big]
    if mean[~big].sum() > 0:
        observed, wanted = (
            np.append(observed, counts[~big].sum()),
            np.append(wanted, mean[~big].sum()),
        )
    degrees = len(observed) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    # Wilson-Hilferty: the cube root of chi-square / degrees is nearly normal; 4 deviations
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert z < 4, f"chi-square {statistic:.1f} at {degrees} degrees of freedom"


EDGES = [{"top_k": 1}, {"top_k": 500}, {"top_p": 0.05}, {"top_p": 0.999}, {"min_p": 1.0}]


@pytest.mark.parametrize("settings", [*EDGES, *SETTINGS[3:]], ids=str)
def test_truncation_equals_hugging_face(settings):
    logits = np.random.default_rng(2).normal(0, 2, (200, VOCAB)).astype(np.float32)
    tempered = logits / settings.get("temperature", 1.0)
    mask = truncation_mask(
        jnp.exp(tempered - tempered.max(-1, keepdims=True)), Sampling(**settings)
    )
    np.testing.assert_array_equal(mask, hugging_face_mask(logits, **settings))
    assert np.asarray(mask)[np.arange(200), logits.argmax(-1)].all()


def test_a_zero_weight_is_never_drawn_from_a_large_vocabulary():
    """40 000 tokens, most of them truncated: whole blocks of 128 without a survivor, where a
    parallel sum rounds."""
    rows, vocab = 400, 40_000
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(0, 1, (rows, vocab)), jnp.float32)
    sampling = Sampling(top_k=50)
    keys = jax.random.split(jax.random.key(2), rows)
    tokens, behaviour, _ = jax.jit(draw, static_argnums=2)(logits, keys, sampling)
    mask = np.asarray(logits) >= np.sort(np.asarray(logits), -1)[:, -50:-49]
    assert mask[np.arange(rows), np.asarray(tokens)].all()
    np.testing.assert_allclose(
        behaviour, take(log_softmax(np.where(mask, logits, -np.inf)), tokens), atol=1e-5
    )


@pytest.mark.parametrize("size", [128, 1200])
def test_search_never_lands_on_a_zero_weight(size):
    """Every boundary of the cumulative sum, and its neighbours, as the uniform number."""
    weights = np.exp(np.random.default_rng(4).normal(0, 2, size)).astype(np.float32)
    weights[np.random.default_rng(5).random(size) < 0.6] = 0
    total = np.asarray(jnp.cumsum(weights))
    u = (total / total[-1]).astype(np.float32)
    u = np.clip(
        np.concatenate([[0.0], u, np.nextafter(u, np.float32(0)), np.nextafter(u, np.float32(2))]),
        0,
        1 - 2.0**-24,
    )
    index = jax.vmap(_search, (None, 0))(jnp.asarray(weights), jnp.asarray(u, jnp.float32))
    assert (weights[np.asarray(index)] > 0).all()


def test_greedy(logits):
    rows = jnp.asarray(np.stack([logits, np.roll(logits, 5)]))
    tokens, behaviour, policy = draw(
        rows, jax.random.split(jax.random.key(0), 2), Sampling(temperature=0)
    )
    np.testing.assert_array_equal(tokens, np.argmax(rows, -1))
    np.testing.assert_array_equal(behaviour, 0)
    np.testing.assert_allclose(policy, take(log_softmax(rows), tokens), atol=1e-5)


def test_a_row_depends_on_its_own_key_and_logits_only(logits):
    keys = jax.random.split(jax.random.key(3), 16)
    rows = jnp.asarray(np.random.default_rng(6).normal(0, 1, (16, VOCAB)), jnp.float32)
    together, *_ = draw(rows, keys, Sampling())
    backwards, *_ = draw(rows[::-1], keys[::-1], Sampling())
    np.testing.assert_array_equal(together, backwards[::-1])

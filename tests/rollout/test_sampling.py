"""Draws against their distribution, and truncation against the Hugging Face rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import VOCAB, hugging_face_mask, log_softmax, take

from fp8rl_jax import rl
from fp8rl_jax.models.logprobs import scores
from fp8rl_jax.precision import Compute
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
    tokens, behaviour, policy, _ = jax.jit(draw, static_argnums=2)(
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


def test_what_is_kept_is_what_was_drawn_from_and_no_more_than_the_size_of_it():
    """The draws are those without supports where these hold all that truncation keeps."""
    settings = {"temperature": 0.7, "top_k": 40, "top_p": 0.8}
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 2, (400, VOCAB)), jnp.float32)
    keys = jax.random.split(jax.random.key(2), 400)
    keep, tempered = hugging_face_mask(logits, **settings), np.asarray(logits, np.float64) / 0.7
    plain = jax.device_get(draw(logits, keys, Sampling(**settings)))
    assert plain.support is None
    for size in (40, 3):
        found = jax.device_get(draw(logits, keys, Sampling(**settings, support_size=size)))
        ids, count = found.support
        np.testing.assert_array_equal(count, keep.sum(-1))
        ranks = np.argsort(-np.where(keep, tempered, -np.inf), axis=-1, kind="stable")[:, :size]
        real = np.arange(size) < count[:, None]
        np.testing.assert_array_equal(ids, np.where(real, ranks, ranks[:, :1]))
        inside = np.zeros(keep.shape, bool)
        np.put_along_axis(inside, ids, True, -1)
        expected = log_softmax(np.where(inside, tempered, -np.inf))
        np.testing.assert_allclose(
            found.behaviour_logprobs, take(expected, found.tokens), atol=1e-5
        )
        np.testing.assert_allclose(
            found.policy_logprobs, take(log_softmax(tempered), found.tokens), atol=1e-5
        )
        assert (size == 40) == bool((found.tokens == plain.tokens).all())
    assert (count > 3).mean() > 0.2 and (count < 3).any()  # the cap is met, and is not


def test_greedy_and_whole_distributions_have_no_support(logits):
    key = jax.random.split(jax.random.key(0), 1)
    for settings in ({"temperature": 0.0, "top_k": 3}, {}, {"top_k": 3}):
        sampling = Sampling(**settings, support_size=3)
        kept = draw(jnp.asarray(logits[None]), key, sampling).support is not None
        assert kept == sampling.keeps_support == (settings == {"top_k": 3})


def test_a_full_vocabulary_trainer_has_the_kept_mass_as_mean_ratio_and_replay_has_1():
    """TRL #7269: a kept mass of .895 gave .896, and 1.001 over the replayed support. Here each
    token's distribution keeps a mass of its own, .895 in the mean, and the trainer is the sampler:
    the mean over what is drawn is the mass, whatever is drawn."""
    rng, tokens, kept = np.random.default_rng(0), 3000, 5
    mass = 0.895 + rng.uniform(-0.08, 0.08, tokens)
    mass -= mass.mean() - 0.895
    head = rng.uniform(0.5, 1.0, (tokens, kept))
    tail = rng.uniform(0.1, 0.2, (tokens, 95))
    probabilities = np.concatenate(
        [
            mass[:, None] * head / head.sum(-1, keepdims=True),
            (1 - mass)[:, None] * tail / tail.sum(-1, keepdims=True),
        ],
        -1,
    )
    logits = jnp.asarray(np.log(probabilities), jnp.float32)
    keys = jax.random.split(jax.random.key(0), tokens)
    drawn = draw(logits, keys, Sampling(top_k=kept, support_size=kept))
    behaviour, mask = drawn.behaviour_logprobs[None], jnp.ones((1, tokens), bool)
    assert len(np.unique(drawn.tokens)) == kept
    for support, mean, outside in ((None, 0.895, 0.5), (drawn.support, 1.0, 0.0)):
        trained, _ = scores(Compute(), logits, drawn.tokens, 1.0, support)
        found = rl.correction(trained[None] - behaviour, mask, rl.CorrectionConfig("token_tis"))[2]
        values = rl.metric_values(found)
        assert values["correction/ratio_mean"] == pytest.approx(mean, abs=1e-4)
        assert values["correction/ratio_outside_frac"] == pytest.approx(outside, abs=0.1)


def test_a_zero_weight_is_never_drawn_from_a_large_vocabulary():
    """40 000 tokens, most of them truncated: whole blocks of 128 without a survivor, where a
    parallel sum rounds."""
    rows, vocab = 400, 40_000
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(0, 1, (rows, vocab)), jnp.float32)
    sampling = Sampling(top_k=50)
    keys = jax.random.split(jax.random.key(2), rows)
    tokens, behaviour, *_ = jax.jit(draw, static_argnums=2)(logits, keys, sampling)
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
    tokens, behaviour, policy, _ = draw(
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

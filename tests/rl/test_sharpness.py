"""The closed form of sharpness against a search over the box in float64."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import rl
from fp8rl_jax.rl.sharpness import EPSILONS


def loss(z: np.ndarray, target: int) -> np.ndarray:
    """Cross-entropy of each row, float64."""
    top = z.max(-1, keepdims=True)
    return np.log(np.exp(z - top).sum(-1)) + top[..., 0] - z[..., target]


def ours(logits: np.ndarray, targets: np.ndarray, epsilon: float) -> np.ndarray:
    found = jax.jit(rl.sharpness)(jnp.asarray(logits, jnp.float32), jnp.asarray(targets), epsilon)
    return np.asarray(found, np.float64)


def test_it_is_the_best_corner_and_no_search_beats_it():
    rng = np.random.default_rng(0)
    logits, targets = 4 * rng.normal(size=(6, 7)).astype(np.float32), np.arange(6) % 7
    logits[1, 1], logits[2, 2] = 15, -12  # all but certain of its token, and of another one
    for epsilon in (*EPSILONS, 0.5):
        found = ours(logits, targets, epsilon)
        for z, target, value in zip(logits.astype(np.float64), targets, found, strict=True):
            room, least = epsilon * (np.abs(z) + 1), loss(z, target)

            def risen(d, z=z, target=target, least=least):
                return 100 * (loss(z + d, target) - least) / (1 + least)

            corners = np.array(list(itertools.product((-1, 1), repeat=len(z)))) * room
            np.testing.assert_allclose(value, risen(corners).max(), rtol=1e-5)
            drawn = rng.uniform(-1, 1, (2000, len(z))) * room
            best = drawn[risen(drawn).argmax()].copy()
            for i in range(len(z)):  # one coordinate after another
                tried = np.repeat(best[None], 21, 0)
                tried[:, i] = np.linspace(-1, 1, 21) * room[i]
                best = tried[risen(tried).argmax()]
            assert risen(best) <= value * (1 + 1e-5)
            assert risen(best) > 0.9 * value


def test_a_large_vocabulary_and_a_loss_of_almost_nothing():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 50_000)).astype(np.float32) * 5
    targets = np.array([7, 8, 9])
    logits[0, 7] = 45
    z, rows = logits.astype(np.float64), np.arange(3)
    moved = z + 1e-3 * (np.abs(z) + 1)
    moved[rows, targets] = z[rows, targets] - 1e-3 * (np.abs(z[rows, targets]) + 1)

    def rows_loss(z):
        others = z - z[rows, targets][:, None]
        others[rows, targets] = -np.inf
        return np.log1p(np.exp(others).sum(-1))

    least = rows_loss(z)
    want = 100 * (rows_loss(moved) - least) / (1 + least)
    np.testing.assert_allclose(ours(logits, targets, 1e-3), want, rtol=2e-5)
    assert 0 < want[0] < 1e-6 and least[0] < 1e-7


def test_metrics_are_means_over_the_sequences_that_have_a_token():
    logits, targets = jnp.asarray([[1.0, 2, 3], [0, 0, 0], [3, 1, -1]]), jnp.asarray([0, 1, 2])
    mask = jnp.asarray([True, False, True])
    found = rl.metric_values(rl.sharpness_metrics(logits, targets, mask))
    assert [*found] == ["sharpness/0.0005", "sharpness/0.001", "sharpness/0.01"]
    each = ours(np.asarray(logits), np.asarray(targets), 1e-2)
    np.testing.assert_allclose(found["sharpness/0.01"], (each[0] + each[2]) / 2, rtol=1e-5)

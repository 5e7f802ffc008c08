"""Chunked log-probabilities against float64, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.models.logprobs import Support, token_logprobs
from fp8rl_jax.models.policy import Policy, Weight


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [2, 7, 1024])
def test_values_and_gradients(chunk, entropy_gradient):
    rng = np.random.default_rng(0)
    hidden, head = (
        rng.normal(size=(2, 7, 24)).astype(np.float32),
        rng.normal(size=(131, 24)).astype(np.float32),
    )
    targets, weights = rng.integers(0, 131, (2, 7)), rng.normal(size=(2, 7)).astype(np.float32)

    def loss(hidden, head):
        policy = Policy(None, Weight(head, ("vocab", "embed")), None, None, None)
        logprobs, entropy = token_logprobs(
            hidden, policy, jnp.asarray(targets, jnp.int32), 0.7, chunk, entropy_gradient
        )
        return (weights * logprobs + entropy).sum(), (logprobs, entropy)

    (dhidden, dhead), (logprobs, entropy) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
        hidden, head
    )
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / 0.7
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        logprobs, np.take_along_axis(table, targets[..., None], -1)[..., 0], atol=1e-4
    )
    np.testing.assert_allclose(entropy, -(np.exp(table) * table).sum(-1), atol=1e-4)
    dlogits = weights[..., None] * (np.eye(131)[targets] - np.exp(table)) / 0.7
    if entropy_gradient:
        p = np.exp(table)
        dlogits -= p * (table - (p * table).sum(-1, keepdims=True)) / 0.7
    np.testing.assert_allclose(dhidden, dlogits @ head, atol=1e-4)
    np.testing.assert_allclose(dhead, np.einsum("btv,bth->vh", dlogits, hidden), atol=1e-4)


@pytest.mark.parametrize(("chunk", "entropy_gradient"), [(2, True), (1024, False)])
def test_values_and_gradients_over_supports(chunk, entropy_gradient):
    """The softmax of the supports' logits alone. A token of which nothing was sampled has a finite
    gradient that a mask makes 0, and one that is not in its support is NaN."""
    rng, size = np.random.default_rng(0), 6
    hidden, head = (
        rng.normal(size=(2, 7, 24)).astype(np.float32),
        rng.normal(size=(131, 24)).astype(np.float32),
    )
    count = rng.integers(1, 9, (2, 7)).astype(np.int32)  # more than a support holds, too
    count[0, 3] = 0
    ids = rng.permuted(np.broadcast_to(np.arange(131), (2, 7, 131)), axis=-1)[..., :size]
    real = np.arange(size) < count[..., None]
    ids = np.where(real, ids, ids[..., :1]).astype(np.int32)
    place = rng.integers(0, np.clip(count, 1, size))
    targets = np.take_along_axis(ids, place[..., None], -1)[..., 0]
    weights = np.where(count, rng.normal(size=(2, 7)), 0).astype(np.float32)

    def loss(hidden, head, targets):
        policy = Policy(None, Weight(head, ("vocab", "embed")), None, None, None)
        logprobs, entropy = token_logprobs(
            hidden, policy, targets, 0.7, chunk, entropy_gradient, Support(ids, jnp.asarray(count))
        )
        return (weights * (logprobs + entropy)).sum(), (logprobs, entropy)

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (dhidden, dhead), (logprobs, entropy) = run(hidden, head, targets)
    inside = np.zeros((2, 7, 131), bool)
    np.put_along_axis(inside, ids, True, -1)
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / 0.7
    p = np.where(inside, np.exp(logits), 0)
    p /= p.sum(-1, keepdims=True)
    table = np.log(np.where(inside, p, 1))
    expected = np.take_along_axis(table, targets[..., None], -1)[..., 0], -(p * table).sum(-1)
    sampled = count > 0
    for found, wanted in zip((logprobs, entropy), expected, strict=True):
        np.testing.assert_allclose(
            np.where(sampled, found, 0), np.where(sampled, wanted, 0), atol=1e-4
        )
        assert np.isfinite(found).all()
    dlogits = weights[..., None] * (np.eye(131)[targets] - p) / 0.7
    if entropy_gradient:
        dlogits -= weights[..., None] * p * (table + expected[1][..., None]) / 0.7
    np.testing.assert_allclose(dhidden, dlogits @ head, atol=1e-4)
    np.testing.assert_allclose(dhead, np.einsum("btv,bth->vh", dlogits, hidden), atol=1e-4)
    elsewhere = targets.copy()
    elsewhere[1, 2] = np.flatnonzero(~inside[1, 2])[0]
    found = run(hidden, head, elsewhere)[1][0]
    assert np.flatnonzero(np.isnan(found)).tolist() == [9]

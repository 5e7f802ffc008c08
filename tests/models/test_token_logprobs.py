"""Chunked log-probabilities against float64, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.models.logprobs import token_logprobs
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

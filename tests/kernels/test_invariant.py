"""Batch-invariant operations: a row's bits at every place, in every company, layout and program."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import invariant as trial
from pallas_kernels import invariant
from pallas_kernels.matmul import dot as plain_dot

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LONG = ("experts", "routing", "logprob", "rotate", "combine")
"""Of these the most is compiled."""


def same(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@DTYPES
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in trial.OPERATIONS],
)
def test_a_row_has_its_bits_in_every_company(name, dtype):
    for seed in range(2):
        case = trial.draw(name, seed, jnp.dtype(dtype), most_rows=90)
        assert trial.differences(case) == [], case.shape


def test_plain_operations_do_depend_on_the_batch():
    """Or the test above would show nothing."""
    cases = [trial.draw("dot", seed, jnp.dtype("float32"), 90, plain_dot) for seed in range(3)]
    assert all(trial.differences(case) for case in cases)
    cases = [
        trial.draw("row_sum", seed, jnp.dtype("float32"), 90, lambda x: x.sum(-1, keepdims=True))
        for seed in range(3)
    ]
    assert any(trial.differences(case) for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, dtype",
    [
        ({"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "NPROC": "4"}, "float32"),
        ({"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1"}, "bfloat16"),
    ],
    ids=["avx2 and 4 threads", "1 thread"],
)
def test_it_holds_with_other_instructions_and_threads(environment, dtype):
    """As users compile: optimized."""
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.invariant", "--seeds", "1", "--most-rows", "200"]
    command += ["--dtypes", dtype]
    asked = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stdout[-3000:] + asked.stderr[-3000:]


@pytest.mark.parametrize("k", [1, 24, 576, 4096])
def test_a_product_is_as_near_to_float64_as_a_float32_sum(k):
    rng = np.random.default_rng(k)
    x, w = (rng.normal(size=(n, k)).astype(np.float32) for n in (5, 7))
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    bound = (k + 1) * 2.0**-24 * (np.abs(x) @ np.abs(w).T)
    found = np.asarray(invariant.dot(jnp.asarray(x), jnp.asarray(w)))
    assert np.all(np.abs(found - expected) <= bound)
    total = np.asarray(invariant.row_sum(jnp.asarray(x)), np.float64)[:, 0]
    assert np.all(
        np.abs(total - x.astype(np.float64).sum(1)) <= (k + 1) * 2.0**-24 * np.abs(x).sum(1)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_product_rounds_to_16_bits_only_at_the_end(dtype):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, 32)), dtype) for n in (4, 5))
    expected = (np.asarray(x, np.float64) @ np.asarray(w, np.float64).T).astype(dtype)
    assert same(invariant.dot(x, w, dtype), expected)


def test_grouped_dot_equals_dot_of_each_group():
    """To the bit where both are XLA's; the CPU kernel's `dot` adds in an order of its own."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(600, 48)), rng.normal(size=(4, 20, 48))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    out = invariant.grouped_dot(x, w, jnp.array([310, 0, 160, 80]))
    for rows, group in ((slice(0, 310), 0), (slice(310, 470), 2), (slice(470, 550), 3)):
        assert same(out[rows], invariant.dot(x[rows], w[group], backend="reference"))
        np.testing.assert_allclose(out[rows], invariant.dot(x[rows], w[group]), atol=1e-4)
    assert not np.asarray(out[550:]).any()


def test_values_that_are_not_finite_stay_in_their_row():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, 16)).astype(np.float32) for n in (3, 4))
    x[1, 3] = np.inf
    x, w = jnp.asarray(x), jnp.asarray(w)
    out = np.asarray(invariant.dot(x, w))
    others = invariant.dot(x[jnp.array([0, 2])], w)
    assert not np.isfinite(out[1]).any() and same(out[[0, 2]], others)


def test_gradients_are_those_of_the_plain_product():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, 24)), jnp.float32) for n in (6, 5))

    def gradients(product):
        return jax.jit(jax.grad(lambda x, w: (jnp.sin(product(x, w))).sum(), argnums=(0, 1)))(x, w)

    for found, expected in zip(gradients(invariant.dot), gradients(plain_dot), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    sizes, weights = jnp.array([2, 4]), jnp.stack([w, 2 * w])
    slope = jax.grad(lambda x: invariant.grouped_dot(x, weights, sizes).sum())(x)
    np.testing.assert_allclose(
        slope, np.repeat([1.0, 2.0], sizes)[:, None] * w.sum(0), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(
        jax.grad(lambda x: invariant.row_sum(x).sum())(x), np.ones((6, 24))
    )

"""The numbers of a comparison against float64 numpy, and the edges: nothing differs, zeros,
infinities."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.compare.causes import Difference, difference, logprob_differences


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_every_number_is_the_float64_one(dtype):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(7, 5)).astype(dtype)
    b = np.where(rng.random((7, 5)) < 0.4, (a.astype(np.float64) * 1.3 + 0.1).astype(dtype), a)
    found = difference(a, b)
    wide, delta = a.astype(np.float64), a.astype(np.float64) - b.astype(np.float64)
    assert found.elements == 35 and found.differing == (delta != 0).sum() / 35 > 0
    assert found.relative_error == pytest.approx(
        np.sqrt((delta**2).sum() / (wide**2).sum()), rel=1e-12
    )
    assert found.snr_db == pytest.approx(
        10 * np.log10((wide**2).sum() / (delta**2).sum()), rel=1e-12
    )
    assert found.max_abs == np.abs(delta).max()


def test_equal_arrays_have_zeros_and_no_snr():
    x = np.array([1.0, -0.0, np.nan, np.inf], np.float32)
    assert difference(x, x.copy()) == Difference(4, 0.0, 0.0, None, 0.0)
    assert difference(x, x.copy()).equal


def test_one_bit_counts_and_so_does_the_sign_of_zero():
    x = np.ones(8, np.float32)
    y = x.copy()
    y[3] = np.nextafter(np.float32(1), np.float32(2))
    assert difference(x, y).differing == 1 / 8 and difference(x, y).max_abs == 2.0**-23
    signs = difference(np.float32([0.0]), np.float32([-0.0]))
    assert signs.differing == 1 and signs.relative_error == 0 and not signs.equal


def test_what_is_not_finite_is_none():
    for a, b in (([np.nan, 1], [1, 1]), ([np.inf, 1], [1, 1]), ([0, 0], [1, 1])):
        found = difference(np.float32(a), np.float32(b))
        assert not found.equal and found.relative_error is None and found.snr_db is None
        json.dumps(vars(found), allow_nan=False)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shapes"):
        difference(np.zeros(3, np.float32), np.zeros((3, 1), np.float32))


def test_log_probabilities_count_real_tokens_alone():
    rng = np.random.default_rng(1)
    a = -rng.exponential(size=(3, 6)).astype(np.float32)
    b = (a + rng.normal(0, 0.2, a.shape)).astype(np.float32)
    mask = np.arange(6) < np.array([6, 3, 1])[:, None]
    a[~mask] = np.nan
    b[0, 4] = a[0, 4] - 3
    found = logprob_differences(a, b, mask)
    delta = (b.astype(np.float64) - a)[mask]
    assert found["tokens"] == 10 and found["differing"] == (delta != 0).mean()
    assert found["mean_abs"] == pytest.approx(np.abs(delta).mean()) and found[
        "max_abs"
    ] == pytest.approx(3, rel=1e-6)
    assert found["k3"] == pytest.approx((np.exp(delta) - 1 - delta).mean(), rel=1e-9)
    assert (found["row"], found["position"], found["a"], found["b"]) == (0, 4, a[0, 4], b[0, 4])

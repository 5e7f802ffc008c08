from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError

inference_gap = jax.jit(rl.inference_gap)


def test_the_gap_matches_float64(make_batch, spoil_padding):
    """Equations 9 and 10 of arXiv 2606.29526, completion by completion."""
    batch = make_batch(2)
    mask, valid = batch["mask"], np.array([True] * 6 + [False, True])
    terms = []
    for b in np.flatnonzero(valid):
        keep = mask[b]
        gap = (batch["logprobs"][b].astype(np.float64) - batch["rollout"][b])[keep]
        terms.append(np.exp(gap.mean() if keep.any() else 0.0) * float(batch["advantages"][b]))
    found = inference_gap(
        jnp.asarray(spoil_padding(batch["rollout"], mask)),
        jnp.asarray(spoil_padding(batch["logprobs"], mask)),
        jnp.asarray(mask),
        jnp.asarray(batch["advantages"]),
        jnp.asarray(valid),
    )
    np.testing.assert_allclose(found, -np.mean(terms), rtol=1e-5)


def test_the_gap_is_negative_where_the_trainer_alone_likes_what_is_good():
    advantages, everywhere = jnp.array([1.0, -1.0]), jnp.ones((2, 3), bool)
    served, likes_good = jnp.full((2, 3), -1.0), jnp.array([[-0.5] * 3, [-1.5] * 3])
    valid = jnp.ones(2, bool)
    assert inference_gap(served, likes_good, everywhere, advantages, valid) < -0.5
    assert inference_gap(likes_good, served, everywhere, advantages, valid) > 0.5
    assert inference_gap(served, served, everywhere, advantages, valid) == 0


def test_the_tolerance_falls_linearly():
    paper = rl.AcceptanceConfig(start=1e-3, end=0.0)
    found = [paper.tolerance(step) for step in (0, 25, 100, 500)]
    np.testing.assert_allclose(found, [1e-3, 7.5e-4, 0, 0], atol=1e-12)
    for changes in ({"start": -1e-3}, {"end": float("nan")}, {"decay_steps": 0}):
        with pytest.raises(UserError, match=f"^rl.acceptance.{next(iter(changes))}: "):
            rl.AcceptanceConfig(**changes)

"""The studies of gradients and of depth on a tiny policy: each part is what it is said to be."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import VOCAB, WIDTH, make_policy, make_prompts

from experiments import depth
from experiments.gradients import distance, gradient, padded
from fp8rl_jax.training.step import Batch


@pytest.mark.slow
def test_a_gradient_depends_on_its_neighbours_where_groups_span_rows():
    rng, new, prompts = (
        np.random.default_rng(0),
        8,
        make_prompts(lengths=[9, 5, 7, 6], ids=range(4)),
    )
    tokens, mask = (
        rng.integers(1, VOCAB, (8, new), np.int32),
        np.arange(new) < rng.integers(3, new, (8, 1)),
    )
    advantages = rng.normal(size=8).astype(np.float32)
    batch = Batch(
        prompts.tokens, prompts.lengths, tokens, mask, np.zeros((8, new), np.float32), advantages
    )
    policy, whole_groups = make_policy(), padded(batch, 128 - new, 128 - WIDTH)

    def moved(batch):
        return distance(*(gradient(policy, batch, "jet-rl", parts, "float32") for parts in (2, 1)))

    spanning, aligned = moved(batch), moved(whole_groups)
    assert spanning > 3 * aligned and 1e-3 < spanning < 0.1, (spanning, aligned)


@pytest.mark.slow
def test_parts_of_the_mismatch(monkeypatch):
    """What a recipe does not have is 0 to the bit, and what it has is more than the order of
    sums."""
    monkeypatch.setattr(depth, "model", lambda weights: make_policy())
    monkeypatch.setattr(depth, "prompts", lambda: make_prompts(lengths=[4, 9, 7, 5], ids=range(4)))
    for name, value in {"SETS": ("one", "two"), "PROMPTS": 2, "WIDTH": WIDTH, "NEW": 3}.items():
        monkeypatch.setattr(depth, name, value)
    monkeypatch.setattr(
        depth, "_sample", lambda policy, *rest: Sampled(jnp.asarray([[5, 9, 3]] * 4, jnp.int32))
    )
    found = depth.point("random", 1, "float32", ("bf16", "fp8-rollout", "fp8-kv"))
    assert found["bf16"]["formats"] == found["bf16"]["cache"] == [0.0, 0.0]
    assert (
        found["bf16"]["total"] == pytest.approx(found["bf16"]["order"])
        and max(found["bf16"]["total"]) < 1e-10
    )
    assert (
        found["fp8-rollout"]["cache"] == [0.0, 0.0] and min(found["fp8-rollout"]["formats"]) > 1e-6
    )
    assert found["fp8-kv"]["formats"] == [0.0, 0.0] and min(found["fp8-kv"]["cache"]) > 1e-8
    points = [{"weights": "random", "depth": 1, "dtype": "float32", "commit": "c", "k3": found}]
    assert "| `fp8-kv` |" in depth.summary(points)


class Sampled:
    def __init__(self, tokens):
        self.tokens = tokens

"""The studies of gradients and of depth on a tiny policy: each part is what it is said to be."""

from __future__ import annotations

import numpy as np
import pytest
from rollout.tiny import VOCAB, WIDTH, make_policy, make_prompts

from experiments import depth, exploration
from experiments.gradients import distance, gradient, padded
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling
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
    sums. Each rollout samples once, and its own samples are scored."""
    monkeypatch.setattr(depth, "model", lambda weights: make_policy())
    monkeypatch.setattr(depth, "prompts", lambda: make_prompts(lengths=[4, 9, 7, 5], ids=range(4)))
    for name, value in {"SETS": ("one", "two"), "PROMPTS": 2, "WIDTH": WIDTH, "NEW": 3}.items():
        monkeypatch.setattr(depth, name, value)
    rollouts, scored = [], []

    def sample(policy, *rest):
        rollouts.append(generate(policy, *rest, samples=1, sampling=Sampling(max_new_tokens=3)))
        return rollouts[-1]

    def at_once(policy, tokens, *rest, run=depth._at_once):
        scored.append(tokens.completions)
        return run(policy, tokens, *rest)

    monkeypatch.setattr(depth, "_sample", sample)
    monkeypatch.setattr(depth, "_at_once", at_once)
    recipes = ("bf16", "fp8-rollout", "fp8-e2e", "fp8-kv")
    found = depth.point("random", 1, "float32", recipes)
    samples = [rollout.tokens for rollout in rollouts]
    # bf16, fp8-rollout with fp8-e2e's trainer besides, fp8-kv with its cache besides
    wanted = [samples[i] for i in (0, 0, 1, 1, 1, 2, 2, 2)]
    assert len(samples) == 3 and list(map(id, scored)) == list(map(id, wanted))

    assert found["bf16"]["formats"] == found["bf16"]["cache"] == [0.0, 0.0]
    assert found["bf16"]["total"] == found["bf16"]["order"] and max(found["bf16"]["total"]) < 1e-10
    linears, flow = found["fp8-rollout"], found["fp8-e2e"]
    assert linears["cache"] == flow["cache"] == [0.0, 0.0] and min(linears["formats"]) > 1e-6
    assert linears["order"] == flow["order"] and max(flow["formats"]) < min(linears["formats"])
    assert found["fp8-kv"]["formats"] == [0.0, 0.0] and min(found["fp8-kv"]["cache"]) > 1e-8
    assert {of["tokens"] for of in found.values()} == {12}
    assert all(1 / 12 < of["share"] <= 1 for of in found.values())


@pytest.mark.slow
def test_noise_and_a_base_of_few_bits_are_told_apart(monkeypatch):
    """Noise is compared with its own base, and a base with the unquantized policy."""
    given = make_prompts(lengths=[4, 9, 7, 5], ids=range(4))
    monkeypatch.setattr(exploration, "prompts", lambda: given)
    monkeypatch.setattr(exploration, "BASES", {"bf16": "", "int4": "int4-1x128"})
    monkeypatch.setattr(exploration, "SIGMAS", (0.02, 0.2))
    rows = list(exploration.measure(make_policy(), exploration.Arguments(tokens=3, draws=2)))
    assert [(x["base"], x["sigma"]) for x in rows] == [
        (base, sigma) for base in ("bf16", "int4") for sigma in (0.0, 0.02, 0.2)
    ]
    assert {x["tokens"] for x in rows} == {12}
    plain, base = rows[0], rows[3]
    assert plain["less"]["mean"] == plain["k3"] == 0 and base["k3"] > 1e-6
    for at in (plain, base):
        little, much = rows[rows.index(at) + 1 : rows.index(at) + 3]
        assert 1e-7 < little["k3"] < much["k3"] / 10
        for x in (little, much):
            assert x["less"]["mean"] == pytest.approx(x["entropy"] - at["entropy"], abs=2e-3)
    assert base["less"]["mean"] == pytest.approx(base["entropy"] - plain["entropy"], abs=2e-3)


def test_a_point_in_the_table():
    """The mean is not the median, and the deepest point has the rest."""
    parts = {part: [1e-3, 2e-3, 9e-3] for part in ("formats", "cache", "order")}
    k3 = parts | {"total": [1e-3, 2e-3, 9e-3], "tokens": 12, "share": 0.5, "largest": 0.1}
    points = [
        {"weights": "random", "depth": d, "dtype": "float32", "k3": {"bf16": k3}} for d in (2, 1)
    ]
    (row,) = (line for line in depth.summary(points).splitlines() if line.startswith("| `bf16`"))
    deepest = "4.0e-03 (1.0e-03 to 9.0e-03) / 2.0e-03"
    assert row == f"| `bf16` | 4.0e-03 / 2.0e-03 | {deepest} |" + " 4.0e-03 |" * 3 + " 50% |"

"""Shuffle-R1's rules against its official code, and against the probabilities that they draw with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.shuffle import pairs, shuffled_pairs

# rewards of its own example (the __main__ of shuffle_r1/custom_algos.py), and of three more groups
REWARDS = [
    [8, 4, 4, 4, 5, 3, 3, 3],
    [1, 0, 0, 1, 0, 0, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [0.5, 2, 1, 0, 1, 1, 3, -1],
]
# what xiaomi-research/shuffle-r1 at 31d3ff0 gives for them: compute_pairwise_purning_grpo_advantage
# with purning_ratio 0.5, its pair_index of each group and their adv_sum
PAIRS = [[(0, 7), (4, 6)], [(0, 6), (3, 5)], [(0, 7), (1, 6)], [(6, 7), (1, 3)]]
SUMS = [2.99572182, 1.19828868, 1.93217981, 1.93217981, 0, 0, 3.31062341, 1.6553117]


def inputs(seed: int = 0, samples: int = 8) -> rl.SelectionInputs:
    rewards = jnp.asarray(REWARDS, jnp.float32)[:, :samples]
    advantages = rl.group_advantages(rewards.reshape(-1), samples, rl.AdvantageConfig())
    true, lengths = jnp.ones(rewards.shape, bool), jnp.ones(rewards.shape, jnp.int32)
    shaped = advantages.reshape(rewards.shape)
    return rl.SelectionInputs(shaped, rewards, true, lengths, true, jax.random.key(seed))


def rows_of(*, of=PAIRS) -> list[tuple[int, int]]:
    return [(8 * i + a, 8 * i + b) for i, group in enumerate(of) for a, b in group]


def test_pairs_are_those_of_the_official_code():
    rows, weights = rl.select(inputs(), rl.RLConfig(selection=pairs))
    assert rows.shape == (4, 4) and np.all(weights == 1)
    assert [tuple(pair) for pair in rows.reshape(-1, 2).tolist()] == rows_of()
    config = rl.RLConfig(selection=pairs, selection_args={"kept": 1.0})
    assert sorted(rl.select(inputs(), config)[0].reshape(-1).tolist()) == list(range(32))


def test_pairs_are_drawn_in_proportion_to_their_advantages():
    known = {pair: total for pair, total in zip(rows_of(), SUMS, strict=True)}
    config = rl.RLConfig(selection=shuffled_pairs, selection_args={"draws": 3.0})

    @jax.jit
    def drawn(seed):
        base = inputs()
        return rl.select(rl.SelectionInputs(**vars(base) | {"key": jax.random.key(seed)}), config)

    many = np.asarray(jax.vmap(lambda seed: drawn(seed)[0])(jnp.arange(2000)))
    assert many.shape == (2000, 8, 2)
    parts = [many[:, :2], many[:, 2:5], many[:, 5:]]  # 8 pairs in three draws
    for part in parts:
        firsts = part[..., 0]
        assert all(len(set(row)) == len(row) for row in firsts.tolist())
        for pair, total in known.items():
            share = np.mean(firsts[:, 0] == pair[0])
            expected = total / sum(SUMS)
            assert share == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 2000)), pair
    # the second of a draw: what numpy.random.choice(replace=False, p=...) has there
    second = {
        pair: sum(
            one / sum(SUMS) * total / (sum(SUMS) - one)
            for other, one in known.items()
            if other != pair
        )
        for pair, total in known.items()
    }
    for pair, expected in second.items():
        found = np.mean(many[:, 3, 0] == pair[0])
        assert found == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 2000)), pair
    one = rl.RLConfig(selection=shuffled_pairs, selection_args={"draws": 1.0})
    firsts = rl.select(inputs(), one)[0][:, 0].tolist()
    assert sorted(firsts) == sorted(pair[0] for pair in rows_of())
    assert set(firsts[-2:]) == {16, 17}  # without advantage, so last


@pytest.mark.parametrize(
    ("rule", "samples", "arguments", "message"),
    [
        (pairs, 7, {}, r"rollout\.samples_per_prompt = 7: .* even number"),
        (pairs, 8, {"kept": 0.2}, r"rl\.selection_args: kept = 0\.2 of 4 pairs"),
        (pairs, 8, {"kept": 1.5}, r"kept = 1\.5 of 4 pairs"),
        (shuffled_pairs, 8, {"draws": 1.5}, r"draws = 1\.5 must be a whole number"),
        (shuffled_pairs, 8, {"draws": 0.0}, r"draws = 0 must be"),
        (shuffled_pairs, 8, {"drawn": 3.0}, r"cannot be called with"),
    ],
)
def test_what_cannot_be_paired_is_one_line(rule, samples, arguments, message):
    config = rl.RLConfig(selection=rule, selection_args=arguments)
    with pytest.raises(UserError, match=message):
        rl.select(inputs(samples=samples), config)
    with pytest.raises(UserError, match=message):
        rl.check_functions(config, samples)

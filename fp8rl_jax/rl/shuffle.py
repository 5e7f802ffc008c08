"""Shuffle-R1 (arXiv 2508.05612): an update learns from the samples of a step that differ most.

Of 2N samples of a prompt most teach little: their advantages are near 0. Two rules of rl.selection,
for steps that sample twice what they learn from (rollout.samples_per_prompt = 16 where 8 teach):

    pairs             pairwise trajectory sampling: a prompt's samples sorted by advantage, the best
                      beside the worst, the second best beside the second worst, ...; the outer half
                      of these pairs stays
    shuffled_pairs    and advantage-based shuffling: several times a part of the step's pairs is
                      drawn without replacement, those of large |advantage| more often, so that they
                      come several times and in other mini-batches

    [rl]
    selection = "fp8rl_jax.rl.shuffle:shuffled_pairs"
    selection_args = { kept = 0.5, draws = 8 }

experiments/recipes/shuffle_r1.toml has the paper's settings. The formulas are those of the official
code (xiaomi-research/shuffle-r1 at 31d3ff0). It refuses a step whose pairs do not divide by the
draws, and one with fewer pairs of any advantage than a draw takes; here draws differ by one pair,
and pairs without advantage come last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.selection import SelectionInputs


def pairs(inputs: SelectionInputs, config: RLConfig, *, kept: float = 0.5) -> Int[Array, "Q m"]:
    """Keep the outermost pairs of each prompt.

    Args:
        inputs: of an even number of samples of each prompt.
        config: not used.
        kept: part of the pairs that stays, rounded down.

    Returns:
        Rows of a prompt in each line, pair after pair.

    Raises:
        UserError: an odd number of samples, or a part that leaves no pair.
    """
    del config
    found = _outer(inputs, kept)
    return found.reshape(len(found), -1)


def shuffled_pairs(
    inputs: SelectionInputs, config: RLConfig, *, kept: float = 0.5, draws: float = 8
) -> Int[Array, "Q 2"]:
    """Keep the outermost pairs of each prompt, and draw from those of all prompts.

    Args:
        inputs, config, kept: as in `pairs`.
        draws: as often are pairs drawn, without replacement within a draw, with probabilities in
            proportion to |advantage| + |advantage|; all draws together are as many as there are.

    Returns:
        Rows of a pair in each line, draw after draw.

    Raises:
        UserError: as `pairs`; draws that are no whole number of at least 1.
    """
    del config
    if draws < 1 or draws != int(draws):
        raise UserError(f"rl.selection_args: draws = {draws:g} must be a whole number, at least 1")
    found = _outer(inputs, kept).reshape(-1, 2)
    weight = jnp.abs(inputs.advantages.reshape(-1)[found]).sum(axis=1)
    keys = jax.random.split(inputs.key, int(draws))
    sizes = [(len(found) + i) // int(draws) for i in range(int(draws))]
    drawn = [_drawn(weight, key)[:size] for key, size in zip(keys, sizes, strict=True)]
    return found[jnp.concatenate(drawn)]


def _outer(inputs: SelectionInputs, kept: float) -> Int[Array, "P pairs 2"]:
    """Rows of the outermost pairs of each prompt, the better one first."""
    prompts, samples = inputs.advantages.shape
    if samples % 2:
        raise UserError(
            f"rollout.samples_per_prompt = {samples}: rl.selection pairs samples, and needs an "
            "even number"
        )
    count = int(samples // 2 * kept)
    if not 1 <= count <= samples // 2:
        raise UserError(
            f"rl.selection_args: kept = {kept:g} of {samples // 2} pairs must leave between 1 and "
            "all of them"
        )
    best_first = jnp.argsort(-inputs.advantages, axis=1, stable=True)
    both = jnp.stack([best_first, best_first[:, ::-1]], axis=2)[:, :count]
    return (both + samples * jnp.arange(prompts)[:, None, None]).astype(jnp.int32)


def _drawn(weight: Float[Array, " n"], key: Array) -> Int[Array, " n"]:
    """All of n in the order in which they are drawn without replacement, with probabilities in
    proportion to their weights (Gumbel's maximum; weights of 0 come last, in random order)."""
    gumbel = jax.random.gumbel(key, weight.shape)
    # a weight of 0 is behind all others, but no infinity, so that the order among them is random
    return jnp.argsort(-(jnp.log(jnp.maximum(weight, 1e-30)) + gumbel))

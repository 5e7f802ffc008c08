"""k3 of a policy in each format, forward passes alone, float32 compute.

    both         weights and activations are served in the format, and a float32 trainer scores
    unified      served in it, and scored by the trainer's program in the same formats, not exact
    weights      the weights alone are served in it
    activations  the activations alone
    given        `both` on the tokens that the row BASE sampled, scored by both programs

k3 is of tokens that the side under test sampled, but in `given`: there it is no unbiased KL, and
says what the choice of the tokens does. Weights are dequantized once, before the programs, which
depend on the activations' format alone then; the trainer's program is `compare.probe.at_once`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.depth import SETS, short
from experiments.formats.rows import BACKEND, BASELINE, BFLOAT16, ROWS, Row
from fp8rl_jax.compare.probe import at_once
from fp8rl_jax.compare.tokens import Tokens
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.forms import predequantized, rollout_policy
from fp8rl_jax.models.policy import Layer, Policy, Weight, with_layers
from fp8rl_jax.precision import PredequantizedWeight
from fp8rl_jax.rl.metrics import k3
from fp8rl_jax.rollout.engine import Prompts, pad_prompts
from fp8rl_jax.rollout.sampler import Rollout, generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tokenizers.tokenizer import Tokenizer

FLOWS = ("both", "unified", "weights", "activations", "given")
BASE = "e4m3-128x128"
IN_TORCH = (BASE, "e4m3-128x128-power_of_two", "e4m3", "e4m3-1xall", "e4m3-1x32")
"""Rows that fake quantization in torch has, too."""


def flows_of(row: Row) -> tuple[str, ...]:
    """Those that a row has: a format of weights alone has no parts, and a compute dtype rounds more
    than activations."""
    if row.name == BFLOAT16:
        return tuple(flow for flow in FLOWS if flow != "activations")
    return FLOWS if row.quantizes_activations else ("both", "unified")


_serve = jax.jit(rollout_policy, static_argnums=(1, 2, 3, 4))
_dequantized = jax.jit(predequantized)
_at_once = jax.jit(at_once)


def prompts(tokenizer: Tokenizer, batch: int, each: int, width: int) -> Prompts:
    """The prompt sets of the depth study one after the other, the last tokens of each prompt.

    Args:
        batch: seed of the problems.
        each: prompts of a set.
        width: tokens.
    """
    import reasoning_gym

    rows = []
    for name in SETS:
        data = reasoning_gym.create_dataset(name, size=each, seed=batch)
        rows += [tokenizer.encode(data[i]["question"])[-width:] for i in range(each)]
    return pad_prompts(rows, list(range(len(rows))), width)


class Batch:
    """Prompts, and what is sampled behind them.

    Args:
        policy: float32 masters, layers stacked.
        given: sets of prompts, one after the other.
        seed: of the draws.
        new: tokens of each completion.
    """

    def __init__(self, policy: Policy, given: Prompts, seed: int, new: int):
        self.policy, self.given, self.key = policy, given, jax.random.key(seed)
        self.sampling = Sampling(max_new_tokens=new)
        self.trainer = served(policy, Row(BASELINE))

    def measure(self, row: Row, flows: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Measure a row, flow by flow."""
        for part in ("both", "weights", "activations"):
            own = {"both": ("both", "unified", "given")}.get(part, (part,))
            if not (wanted := [flow for flow in flows if flow in own]):
                continue
            side = served(self.policy, row, part)
            rollout = self.sampled(side) if wanted != ["given"] else self.base
            for flow in wanted:
                if flow == "given":
                    found = self.scored(self.trainer, self.base), self.scored(side, self.base)
                else:
                    scorer = side if flow == "unified" else self.trainer
                    found = self.scored(scorer, rollout), rollout.policy_logprobs
                yield flow, sums(*found)

    @cached_property
    def base(self) -> Rollout:
        """What BASE samples."""
        (row,) = (row for row in ROWS if row.name == BASE)
        return self.sampled(served(self.policy, row))

    def sampled(self, side: Policy) -> Rollout:
        """Sample one completion of each prompt."""
        return generate(side, *self.given, self.key, samples=1, sampling=self.sampling)

    def scored(self, side: Policy, rollout: Rollout) -> jax.Array:
        """Log-probabilities of a rollout's tokens, all of a completion at once."""
        lengths = rollout.mask.sum(1)
        return _at_once(
            side, Tokens(self.given.tokens, self.given.lengths, rollout.tokens, lengths)
        )


def served(policy: Policy, row: Row, part: str = "both") -> Policy:
    """What serves a row, its weights dequantized; or what has its weights or activations alone."""
    if row.name == BFLOAT16:
        if part == "both":
            return _serve(policy, Recipe("formats"), row.dtype, False, BACKEND)[0]
        policy = jax.tree.map(lambda x: x.astype(row.dtype).astype(jnp.float32), policy)
        return served(policy, Row(BASELINE))
    recipe = row.weights_only if part == "weights" else row.rollout_only
    made = _dequantized(_serve(policy, recipe, row.dtype, False, BACKEND)[0])
    if part != "activations":
        return made
    tensors, masters = made.stack.tensors(), policy.stack.tensors()
    unrounded = {
        name: Weight(replace(weight.value, values=masters[name].value), weight.axes)
        for name, weight in tensors.items()
        if isinstance(weight.value, PredequantizedWeight)
    }
    return with_layers(made, Layer(tensors | unrounded))


def sums(trainer: jax.Array, rollout: jax.Array) -> dict[str, Any]:
    """k3 of each set, its median token, the largest token's share of all, the largest difference of
    a log-probability, and the number of tokens.

    Args:
        trainer, rollout: log-probabilities [prompts, tokens].
    """
    values = np.asarray(k3(trainer - rollout), np.float64)
    return {
        "k3": [short(x) for x in values.reshape(len(SETS), -1).mean(1)],
        "median_token": short(np.median(values)),
        "share": short(values.max() / max(values.sum(), 1e-30)),
        "largest": short(np.abs(trainer - rollout).max()),
        "tokens": values.size,
    }

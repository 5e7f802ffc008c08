"""One step's experience: completions of the step's prompts and their rewards, drawn once or, with DAPO's dynamic sampling, until
enough prompts teach something (arXiv 2503.14476, section 3.2).

What is drawn in round r of a step depends on (seed, step, r) alone, so a resumed run draws the same. Metrics of rewards
describe everything that was sampled; the update sees the chosen prompts, always as many, so that one compiled program serves
every step. Where too few prompts teach something, others fill the batch, and their tokens are left out of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fp8rl_jax import rl
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.parallel import batch_sharding, to_global, to_host
from fp8rl_jax.rollout.engine import Prompts, Rollout, RolloutEngine
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.tasks.workers import RewardPool
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.setup import Setup
from fp8rl_jax.training.step import Batch


@dataclass(frozen=True)
class Experience:
    """What a step learns from.

    Attributes:
        rollout: of the chosen prompts, on the mesh.
        rewards, valid: of its completions, as the task gave them; not valid where the reward failed.
        teaches: chosen prompts that enter the loss; all of them without dynamic sampling.
        scores, examples, texts: of everything that was sampled.
        rounds: how many rollouts it took.
    """

    rollout: Rollout
    rewards: Float[np.ndarray, " b"]
    valid: Bool[np.ndarray, " b"]
    teaches: Bool[np.ndarray, " p"]
    scores: Scores
    examples: list[Example]
    texts: list[str]
    rounds: int

    def batch(self, advantages: Float[Array, " b"], config: RLConfig, truncated: bool) -> Batch:
        """What is trained on.

        Args:
            advantages: of the completions.
            config: its correction resolved.
            truncated: sampling was from a truncated distribution.
        """
        rollout, in_loss = self.rollout, None
        chosen = rl.rollout_logprobs(rollout.behaviour_logprobs, rollout.policy_logprobs, config.correction, truncated=truncated)
        if config.overlong.filter:
            in_loss = rl.drop_truncated(rollout.mask, rollout.stopped)
        if not self.teaches.all():
            kept = np.repeat(self.teaches, len(self.rewards) // len(self.teaches))[:, None]
            in_loss = (rollout.mask if in_loss is None else in_loss) & kept
        prompts = rollout.prompts
        return Batch(
            prompts.tokens, prompts.lengths, rollout.tokens, rollout.mask, chosen, advantages,
            loss_mask=in_loss, prompt_routes=rollout.prompt_expert_ids, routes=rollout.expert_ids,
        )  # fmt: skip

    def shown(self, count: int) -> Iterator[dict[str, Any]]:
        """Rows for samples.jsonl: at most `count` of the completions, evenly spread."""
        n = len(self.texts) // len(self.examples)
        rows = range(0, len(self.texts), max(len(self.texts) // max(count, 1), 1))
        for row in list(rows)[:count]:
            example = self.examples[row // n]
            yield {
                "prompt": example.prompt,
                "completion": self.texts[row],
                "answer": example.answer,
                "reward": float(self.scores.rewards[row]),
            }


class Collector:
    """Draws experience for a run."""

    def __init__(self, setup: Setup, pool: RewardPool):
        self.setup, self.pool, self.dynamic = setup, pool, setup.config.rl.dynamic_sampling
        self.samples = setup.config.rollout.samples_per_prompt
        self.count = setup.config.rollout.prompts_per_step
        self.key = jax.random.fold_in(jax.random.key(setup.config.seed), 0)

    def prompts(self, step: int) -> Prompts:
        """The prompts of the first round of `step`."""
        return self._encoded(self._examples(step, 0))

    def collect(self, engine: RolloutEngine, step: int, clock: Clock) -> Experience:
        """Samples, scores, and with dynamic sampling does so again until enough prompts teach something."""
        drawn = [self._draw(engine, step, 0, clock)]
        if not self.dynamic.enabled:
            rollout, scores, examples, texts = drawn[0]
            return Experience(
                rollout, scores.rewards, ~scores.failed, np.ones(self.count, bool), scores, examples, texts, rounds=1
            )
        teaches = [self._informative(drawn[0][1])]
        while sum(map(np.sum, teaches)) < self.count and len(drawn) < self.dynamic.max_rounds:
            drawn.append(self._draw(engine, step, len(drawn), clock))
            teaches.append(self._informative(drawn[-1][1]))
        return self._chosen(drawn, np.concatenate(teaches))

    def _chosen(self, drawn: list, teaches: Bool[np.ndarray, " q"]) -> Experience:
        rollouts, scores, examples, texts = zip(*drawn, strict=True)
        joined = Scores.join(scores)
        # those that teach first, each in the order of sampling; what is left over is not used
        chosen = np.argsort(~teaches, kind="stable")[: self.count]
        rows = (chosen[:, None] * self.samples + np.arange(self.samples)).reshape(-1)
        return Experience(
            rollout=to_global_rollout(select(list(rollouts), chosen, rows), batch_sharding(self.setup.mesh)),
            rewards=joined.rewards[rows],
            valid=~joined.failed[rows],
            teaches=teaches[chosen],
            scores=joined,
            examples=sum(examples, []),
            texts=sum(texts, []),
            rounds=len(drawn),
        )

    def _draw(self, engine: RolloutEngine, step: int, number: int, clock: Clock):
        examples = self._examples(step, number)
        with clock.part("gen"):
            key = jax.random.fold_in(self.key, step)
            key = jax.random.fold_in(key, number) if number else key
            rollout = engine.generate(self._encoded(examples), self.samples, self.setup.sampling, key)
            jax.block_until_ready(rollout.tokens)
        texts = self.setup.encoder.texts(rollout)
        with clock.part("reward"):
            scores = self.pool.score_together(examples, texts)
        return rollout, scores, examples, texts

    def _informative(self, scores: Scores) -> Bool[np.ndarray, " p"]:
        return np.asarray(rl.informative_groups(jnp.asarray(scores.rewards), self.samples, jnp.asarray(~scores.failed)))

    def _examples(self, step: int, number: int) -> list[Example]:
        rounds = self.dynamic.max_rounds if self.dynamic.enabled else 1
        return list(self.setup.train.batch(step * rounds + number, self.count, self.setup.config.seed))

    def _encoded(self, examples: list[Example]) -> Prompts:
        return to_global(self.setup.encoder.batch(examples), batch_sharding(self.setup.mesh))


def select(rollouts: list[Rollout], prompts: np.ndarray, rows: np.ndarray) -> Rollout:
    """The given prompts and rows of several rollouts laid one after the other, as numpy arrays; all processes call it together.

    Args:
        rollouts: of the same weights and widths.
        prompts: indices into all their prompts.
        rows: indices into all their completions.
    """

    def pick(name: str, which: np.ndarray):
        parts = [getattr(rollout, name) for rollout in rollouts]
        if parts[0] is None:
            return None
        return jax.tree.map(lambda *leaves: np.concatenate([to_host(leaf) for leaf in leaves])[which], *parts)

    by_prompt = {name: pick(name, prompts) for name in ("prompts", "prompt_expert_ids")}
    by_row = ("tokens", "mask", "behaviour_logprobs", "policy_logprobs", "stopped", "expert_ids")
    return replace(rollouts[0], **by_prompt, **{name: pick(name, rows) for name in by_row})


def to_global_rollout(rollout: Rollout, sharding: jax.sharding.Sharding) -> Rollout:
    """The arrays of a rollout on the mesh; its version stays a number."""
    placed = to_global(replace(rollout, weight_version=None), sharding)
    return replace(placed, weight_version=rollout.weight_version)

"""One step's experience: completions of the step's prompts and their rewards, drawn once or, with DAPO's dynamic sampling, until
enough prompts teach something (arXiv 2503.14476, section 3.2).

What is drawn in round r of a step depends on (seed, step, r) alone, so a resumed run draws the same. Metrics of rewards
describe everything that was sampled; the update sees the chosen prompts, always as many, so that one compiled program serves
every step. Where too few prompts teach something, others fill the batch, and their tokens are left out of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from fp8rl_jax import rl
from fp8rl_jax.parallel import batch_sharding, to_global, to_host
from fp8rl_jax.rollout.engine import Prompts, Rollout, RolloutEngine
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.tasks.together import score_together
from fp8rl_jax.tasks.workers import RewardPool
from fp8rl_jax.training.experience import EpisodeExperience, Experience, RolloutExperience, episode_rows
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.play import play
from fp8rl_jax.training.setup import Setup


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
            return self._chosen(drawn, np.ones(self.count, bool))
        teaches = [self._informative(drawn[0][1])]
        while sum(map(np.sum, teaches)) < self.count and len(drawn) < self.dynamic.max_rounds:
            drawn.append(self._draw(engine, step, len(drawn), clock))
            teaches.append(self._informative(drawn[-1][1]))
        return self._chosen(drawn, np.concatenate(teaches))

    def _chosen(self, drawn: list, teaches: Bool[np.ndarray, " q"]) -> Experience:
        sampled, scores, examples, texts = zip(*drawn, strict=True)
        joined = Scores.join(scores)
        # those that teach first, each in the order of sampling; what is left over is not used
        chosen = np.argsort(~teaches, kind="stable")[: self.count]
        rows = (chosen[:, None] * self.samples + np.arange(self.samples)).reshape(-1)
        common = {
            "rewards": joined.rewards[rows],
            "valid": ~joined.failed[rows],
            "teaches": teaches[chosen],
            "scores": joined,
            "examples": sum(examples, []),
            "texts": sum(texts, []),
            "rounds": len(drawn),
        }
        if self.pool.task.max_turns > 1:
            return self._of_episodes(list(chain(*sampled)), rows, common)
        rollout = sampled[0]
        if self.dynamic.enabled:
            rollout = to_global_rollout(select(sampled, chosen, rows), batch_sharding(self.setup.mesh))
        return RolloutExperience(rollout=rollout, **common)

    def _of_episodes(self, episodes: list[Episode], rows: Int[np.ndarray, " c"], common: dict) -> Experience:
        chosen, encoder = [episodes[row] for row in rows], self.setup.encoder
        padded = episode_rows(chosen, encoder.width, self.setup.sampling.max_new_tokens, encoder.pad, len(rows))
        return EpisodeExperience(episodes=chosen, rows=padded, sharding=batch_sharding(self.setup.mesh), **common)

    def _draw(
        self, engine: RolloutEngine, step: int, number: int, clock: Clock
    ) -> tuple[Rollout | list[Episode], Scores, list[Example], list[str]]:
        examples, setup = self._examples(step, number), self.setup
        key = jax.random.fold_in(self.key, step)
        key = jax.random.fold_in(key, number) if number else key
        if self.pool.task.max_turns > 1:
            episodes, scores = play(engine, setup.encoder, self.pool, examples, self.samples, setup.sampling, key, clock)
            return episodes, scores, examples, [episode.transcript for episode in episodes]
        with clock.part("gen"):
            rollout = engine.generate(self._encoded(examples), self.samples, setup.sampling, key)
            jax.block_until_ready(rollout.tokens)
        texts = setup.encoder.texts(rollout)
        with clock.part("reward"):
            scores = score_together(self.pool, examples, texts)
        return rollout, scores, examples, texts

    def _informative(self, scores: Scores) -> Bool[np.ndarray, " p"]:
        return np.asarray(rl.informative_groups(jnp.asarray(scores.rewards), self.samples, jnp.asarray(~scores.failed)))

    def _examples(self, step: int, number: int) -> list[Example]:
        rounds = self.dynamic.max_rounds if self.dynamic.enabled else 1
        return list(self.setup.train.batch(step * rounds + number, self.count, self.setup.config.seed))

    def _encoded(self, examples: list[Example]) -> Prompts:
        return to_global(self.setup.encoder.batch(examples), batch_sharding(self.setup.mesh))


def select(rollouts: Sequence[Rollout], prompts: np.ndarray, rows: np.ndarray) -> Rollout:
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

    by_prompt = {name: pick(name, prompts) for name in ("prompts", "prompt_logprobs", "prompt_expert_ids")}
    by_row = ("tokens", "mask", "behaviour_logprobs", "policy_logprobs", "stopped", "expert_ids")
    return replace(rollouts[0], **by_prompt, **{name: pick(name, rows) for name in by_row})


def to_global_rollout(rollout: Rollout, sharding: jax.sharding.Sharding) -> Rollout:
    """The arrays of a rollout on the mesh; its version stays a number."""
    placed = to_global(replace(rollout, weight_version=None), sharding)
    return replace(placed, weight_version=rollout.weight_version)

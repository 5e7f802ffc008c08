"""One step's experience: what was sampled, its rewards, and the batch that it makes.

A sample is a completion, or an episode of several. Rewards and advantages belong to samples; the trainer works on rows. A
completion is one row. An episode is as many as `join_turns` makes of it, and a batch of them is filled up with empty rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from fp8rl_jax import rl
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.parallel import to_global, to_host
from fp8rl_jax.rollout.engine import Rollout
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode, Rows, pad_rows
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.step import Batch


@dataclass(frozen=True, kw_only=True)
class Experience(ABC):
    """What a step learns from: C samples of P prompts, chosen among all that were sampled.

    Attributes:
        rewards, valid: of the chosen samples, as the task gave them; not valid where the reward failed.
        teaches: chosen prompts that enter the loss; all of them without dynamic sampling.
        scores, examples, texts: of everything that was sampled.
        rounds: how many rollouts it took.
    """

    rewards: Float[np.ndarray, " c"]
    valid: Bool[np.ndarray, " c"]
    teaches: Bool[np.ndarray, " p"]
    scores: Scores
    examples: list[Example]
    texts: list[str]
    rounds: int

    @property
    def entering(self) -> Bool[np.ndarray, " c"]:
        """Samples that enter the loss."""
        return np.repeat(self.teaches, len(self.rewards) // len(self.teaches))

    @abstractmethod
    def batch(self, config: RLConfig, truncated: bool) -> Batch:
        """The rows to train on, with advantages of 0.

        Args:
            config: its correction resolved.
            truncated: sampling was from a truncated distribution.
        """

    @abstractmethod
    def by_sample(self, values: Shaped[Array, " b"]) -> Shaped[Array, " c"]:
        """Sums over the rows of each sample; all processes call it together."""

    @abstractmethod
    def by_row(self, values: Float[Array, " c"]) -> Float[Array, " b"]:
        """The value of each row's sample, 0 for an empty row; all processes call it together."""

    @property
    @abstractmethod
    def policy_logprobs(self) -> Float[Array, "b t"]:
        """The rollout's, over the whole vocabulary."""

    @abstractmethod
    def work(self) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " b"], int]:
        """Lengths of prompts and of what stands behind them, and the number of sampled tokens, for `Clock.work`."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """completions/* and rollout/weight_version; of episodes also episodes/*."""

    def shown(self, count: int) -> Iterator[dict[str, Any]]:
        """Rows for samples.jsonl: at most `count` of the samples, evenly spread."""
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


@dataclass(frozen=True, kw_only=True)
class RolloutExperience(Experience):
    """Completions: row b is sample b. `rollout` is on the mesh."""

    rollout: Rollout

    def batch(self, config: RLConfig, truncated: bool) -> Batch:
        rollout, in_loss = self.rollout, None
        chosen = rl.rollout_logprobs(rollout.behaviour_logprobs, rollout.policy_logprobs, config.correction, truncated=truncated)
        if config.overlong.filter:
            in_loss = rl.drop_truncated(rollout.mask, rollout.stopped)
        if not self.teaches.all():
            in_loss = (rollout.mask if in_loss is None else in_loss) & self.entering[:, None]
        prompts = rollout.prompts
        return Batch(
            prompts.tokens, prompts.lengths, rollout.tokens, rollout.mask, chosen, jnp.zeros_like(chosen[:, 0]),
            loss_mask=in_loss, prompt_routes=rollout.prompt_expert_ids, routes=rollout.expert_ids,
        )  # fmt: skip

    def by_sample(self, values: Shaped[Array, " b"]) -> Shaped[Array, " c"]:
        return values

    def by_row(self, values: Float[Array, " c"]) -> Float[Array, " b"]:
        return values

    @property
    def policy_logprobs(self) -> Float[Array, "b t"]:
        return self.rollout.policy_logprobs

    def work(self) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " b"], int]:
        prompts, mask = to_host((self.rollout.prompts.lengths, self.rollout.mask))
        return prompts, mask.sum(1), int(mask.sum())

    def metrics(self) -> dict[str, float]:
        mask, stopped = to_host((self.rollout.mask, self.rollout.stopped))
        return _completion_metrics(mask.sum(1), stopped) | {"rollout/weight_version": self.rollout.weight_version}


@dataclass(frozen=True, kw_only=True)
class EpisodeExperience(Experience):
    """Episodes of the chosen prompts, and their rows.

    Attributes:
        episodes: [c].
        rows: from `episode_rows`, on the host.
        sharding: of the batch.
    """

    episodes: Sequence[Episode]
    rows: Rows
    sharding: jax.sharding.Sharding

    def batch(self, config: RLConfig, truncated: bool) -> Batch:
        rows = self.rows
        behaviour, policy = jnp.asarray(rows.behaviour_logprobs), jnp.asarray(rows.policy_logprobs)
        chosen = rl.rollout_logprobs(behaviour, policy, config.correction, truncated=truncated)
        batch = Batch(
            rows.prompts, rows.prompt_lengths, rows.tokens, rows.sampled, chosen, np.zeros(len(rows.tokens), np.float32),
            attended=rows.attended,
            loss_mask=None if self.teaches.all() else rows.sampled & (self._spread(self.entering) > 0)[:, None],
        )  # fmt: skip
        return to_global(batch, self.sharding)

    def by_sample(self, values: Shaped[Array, " b"]) -> Shaped[Array, " c"]:
        own, values = self.rows.episode >= 0, to_host(values)
        sums = np.zeros(len(self.episodes), values.dtype)
        np.add.at(sums, self.rows.episode[own], values[own])
        return jnp.asarray(sums)

    def by_row(self, values: Float[Array, " c"]) -> Float[Array, " b"]:
        return to_global(self._spread(to_host(values)), self.sharding)

    def _spread(self, values: np.ndarray) -> Float[np.ndarray, " b"]:
        return np.where(self.rows.episode >= 0, values[self.rows.episode], 0).astype(np.float32)

    @property
    def policy_logprobs(self) -> Float[Array, "b t"]:
        return to_global(self.rows.policy_logprobs, self.sharding)

    def work(self) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " b"], int]:
        own = self.rows.episode >= 0
        return self.rows.prompt_lengths[own], self.rows.attended[own].sum(1), int(self.rows.sampled.sum())

    def metrics(self) -> dict[str, float]:
        """Besides: turns and rows an episode (one row: all its turns were joined), and the part that ended for want of room."""
        turns, count = [turn for episode in self.episodes for turn in episode.turns], len(self.episodes)
        lengths, stopped = np.array([len(turn.tokens) for turn in turns]), np.array([turn.stopped for turn in turns])
        return _completion_metrics(lengths, stopped) | {
            "rollout/weight_version": min(turn.weight_version for turn in turns),
            "episodes/turns": len(turns) / count,
            "episodes/rows": (self.rows.episode >= 0).sum() / count,
            "episodes/truncated": sum(episode.truncated for episode in self.episodes) / count,
        }


def episode_rows(episodes: Sequence[Episode], width: int, max_new_tokens: int, pad: int, multiple: int) -> Rows:
    """The rows of episodes that were played in prompts of `width` tokens: [R, 1] and [R, width + max_new_tokens - 1].

    The two parts of a row, prompt and what follows, have to hold any conversation. One token is the shortest prompt, and with it
    the parts together are no wider than the longest conversation, wherever its first answer begins.
    """
    return pad_rows(episodes, 1, width + max_new_tokens - 1, pad, multiple)


def _completion_metrics(lengths: Int[np.ndarray, " b"], stopped: Bool[np.ndarray, " b"]) -> dict[str, float]:
    return {
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/mean_terminated_length": lengths[stopped].mean() if stopped.any() else 0.0,
        "completions/clipped_ratio": 1.0 - stopped.mean(),
    }

"""What was sampled in one step, and the batch that it makes for the trainer.

A sample is a completion, or an episode of several. Rewards and advantages belong to samples; the
trainer works on rows. A completion is one row. An episode is as many as `join_turns` makes of it,
and a batch of them is filled up with empty rows.

Playing episodes: the policy and the environments take turns, all episodes side by side.

A turn is one call of the engine on the conversations so far. The batch keeps its height: in place
of episodes that have ended one that goes on is repeated, draw by draw, so it takes no longer. Its
width is one of WIDTHS, so a run compiles a few programs. What an episode draws depends on (key,
problem, sample, turn) alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fp8rl_jax import rl
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.parallel import to_global, to_host
from fp8rl_jax.rollout.engine import Rollout, RolloutEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.distributed import play_distributed
from fp8rl_jax.tasks.episodes import Episode, Rows, Sampled, episode_scores, pad_rows
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.prompts import PromptEncoder

Entering = Bool[np.ndarray, " c"] | None
"""Samples that enter the loss; None: all of them."""


@dataclass(frozen=True, kw_only=True)
class Experience(ABC):
    """C samples of P prompts, sample c of prompt c // samples: what a session gives to be rewarded
    and takes back to learn from.

    Attributes:
        texts: [C], completions without special tokens, or transcripts of episodes.
        samples: of each prompt.
        temperature: that they were sampled at.
    """

    texts: list[str]
    samples: int
    temperature: float

    @property
    def prompts(self) -> int:
        """P."""
        return len(self.texts) // self.samples

    @property
    def prompts_in_batch(self) -> int:
        """P, and with it what the batch is filled up with."""
        return self.prompts

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Number of the weight sync that served it; of an episode's turns the oldest."""

    @property
    @abstractmethod
    def tokens(self) -> list[list[int]]:
        """Sampled token ids of each sample, [C][length], the stop token included; all processes
        call it together."""

    @property
    @abstractmethod
    def logprobs(self) -> list[Float[np.ndarray, " length"]]:
        """Log-probability of each of `tokens` in the rollout, at the sampling temperature over the
        whole vocabulary; all processes call it together."""

    @abstractmethod
    def batch(self, config: RLConfig, truncated: bool, entering: Entering = None) -> Batch:
        """The rows to train on, with advantages of 0.

        Args:
            config: its correction resolved.
            truncated: sampling was from a truncated distribution.
            entering: samples in the loss.
        """

    @abstractmethod
    def by_sample(self, values: Shaped[Array, " b"]) -> Shaped[Array, " c"]:
        """Sums over the rows of each sample, filling included; all processes call it together."""

    @abstractmethod
    def by_row(self, values: Float[Array, " c"]) -> Float[Array, " b"]:
        """The value of each row's sample, 0 for an empty row; all processes call it together."""

    @property
    @abstractmethod
    def policy_logprobs(self) -> Float[Array, "b t"]:
        """The rollout's, over the whole vocabulary, in the rows of `batch`."""

    @abstractmethod
    def work(self) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " b"], int]:
        """Lengths of prompts and of what stands behind them, and the number of sampled tokens, for
        `Clock.work`."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """completions/* and rollout/weight_version; of episodes also episodes/*."""


@dataclass(frozen=True, kw_only=True)
class RolloutExperience(Experience):
    """Completions: row b is sample b.

    Attributes:
        rollout: on the mesh. Its prompts may be more than `prompts`: the session fills a batch up
            with copies of the first, so that a compiled program serves several sizes, and their
            rows are empty.
    """

    rollout: Rollout

    @property
    def prompts_in_batch(self) -> int:
        return len(self.rollout.prompts.lengths)

    @property
    def weight_version(self) -> int:
        return self.rollout.weight_version

    @property
    def tokens(self) -> list[list[int]]:
        tokens, mask = self._own(self.rollout.tokens, self.rollout.mask)
        return [row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)]

    @property
    def logprobs(self) -> list[Float[np.ndarray, " length"]]:
        logprobs, mask = self._own(self.rollout.policy_logprobs, self.rollout.mask)
        return [row[kept] for row, kept in zip(logprobs, mask, strict=True)]

    def _own(self, *arrays: Array) -> list[np.ndarray]:
        return [np.asarray(x)[: len(self.texts)] for x in to_host(arrays)]

    def batch(self, config: RLConfig, truncated: bool, entering: Entering = None) -> Batch:
        rollout, in_loss = self.rollout, None
        chosen = rl.rollout_logprobs(
            rollout.behaviour_logprobs,
            rollout.policy_logprobs,
            config.correction,
            truncated=truncated,
        )
        mask, rows = rollout.mask, len(rollout.tokens)
        if len(self.texts) < rows:
            mask = mask & (np.arange(rows) < len(self.texts))[:, None]
        if config.overlong.filter:
            in_loss = rl.drop_truncated(mask, rollout.stopped)
        if entering is not None and not entering.all():
            inside = np.pad(entering, (0, rows - len(entering)))
            in_loss = (mask if in_loss is None else in_loss) & inside[:, None]
        prompts = rollout.prompts
        return Batch(
            prompts.tokens,
            prompts.lengths,
            rollout.tokens,
            mask,
            chosen,
            jnp.zeros_like(chosen[:, 0]),
            loss_mask=in_loss,
            prompt_routes=rollout.prompt_expert_ids,
            routes=rollout.expert_ids,
        )

    def by_sample(self, values: Shaped[Array, " b"]) -> Shaped[Array, " c"]:
        return values

    def by_row(self, values: Float[Array, " c"]) -> Float[Array, " b"]:
        return values

    @property
    def policy_logprobs(self) -> Float[Array, "b t"]:
        return self.rollout.policy_logprobs

    def work(self) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " b"], int]:
        (mask,) = self._own(self.rollout.mask)
        prompts = np.asarray(to_host(self.rollout.prompts.lengths))[: self.prompts]
        return prompts, mask.sum(1), int(mask.sum())

    def metrics(self) -> dict[str, float]:
        mask, stopped = self._own(self.rollout.mask, self.rollout.stopped)
        return _completion_metrics(mask.sum(1), stopped) | {
            "rollout/weight_version": self.weight_version
        }


@dataclass(frozen=True, kw_only=True)
class EpisodeExperience(Experience):
    """Episodes of the prompts, and their rows.

    Attributes:
        episodes: [C].
        rows: from `episode_rows`, on the host.
        sharding: of the batch.
    """

    episodes: Sequence[Episode]
    rows: Rows
    sharding: jax.sharding.Sharding

    @property
    def weight_version(self) -> int:
        return min(turn.weight_version for episode in self.episodes for turn in episode.turns)

    @property
    def tokens(self) -> list[list[int]]:
        return [
            [token for turn in episode.turns for token in turn.tokens] for episode in self.episodes
        ]

    @property
    def logprobs(self) -> list[Float[np.ndarray, " length"]]:
        return [
            np.array([x for turn in e.turns for x in turn.policy_logprobs], np.float32)
            for e in self.episodes
        ]

    def batch(self, config: RLConfig, truncated: bool, entering: Entering = None) -> Batch:
        rows, in_loss = self.rows, None
        behaviour, policy = jnp.asarray(rows.behaviour_logprobs), jnp.asarray(rows.policy_logprobs)
        chosen = rl.rollout_logprobs(behaviour, policy, config.correction, truncated=truncated)
        if entering is not None and not entering.all():
            in_loss = rows.sampled & (self._spread(entering) > 0)[:, None]
        batch = Batch(
            rows.prompts,
            rows.prompt_lengths,
            rows.tokens,
            rows.sampled,
            chosen,
            np.zeros(len(rows.tokens), np.float32),
            attended=rows.attended,
            loss_mask=in_loss,
        )
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
        return (
            self.rows.prompt_lengths[own],
            self.rows.attended[own].sum(1),
            int(self.rows.sampled.sum()),
        )

    def metrics(self) -> dict[str, float]:
        """Besides: turns and rows an episode (one row: all its turns were joined), and the part
        that ended for want of room."""
        turns, count = (
            [turn for episode in self.episodes for turn in episode.turns],
            len(self.episodes),
        )
        lengths, stopped = (
            np.array([len(turn.tokens) for turn in turns]),
            np.array([turn.stopped for turn in turns]),
        )
        return _completion_metrics(lengths, stopped) | {
            "rollout/weight_version": self.weight_version,
            "episodes/turns": len(turns) / count,
            "episodes/rows": (self.rows.episode >= 0).sum() / count,
            "episodes/truncated": sum(episode.truncated for episode in self.episodes) / count,
        }


def episode_rows(
    episodes: Sequence[Episode], width: int, max_new_tokens: int, pad: int, multiple: int
) -> Rows:
    """The rows of episodes that were played in prompts of `width` tokens: [R, 1] and [R, width +
    max_new_tokens - 1].

    The two parts of a row, prompt and what follows, have to hold any conversation. One token is the
    shortest prompt, and with it the parts together are no wider than the longest conversation,
    wherever its first answer begins.
    """
    return pad_rows(episodes, 1, width + max_new_tokens - 1, pad, multiple)


def _completion_metrics(
    lengths: Int[np.ndarray, " b"], stopped: Bool[np.ndarray, " b"]
) -> dict[str, float]:
    return {
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/mean_terminated_length": lengths[stopped].mean() if stopped.any() else 0.0,
        "completions/clipped_ratio": 1.0 - stopped.mean(),
    }


WIDTHS = (4, 2, 1)
"""Prompts are padded to a quarter, a half, or the whole of the encoder's width."""


def play(
    engine: RolloutEngine,
    encoder: PromptEncoder,
    pool: RewardPool,
    examples: Sequence[Example],
    samples: int,
    sampling: Sampling,
    key: Key[Array, ""],
    clock: Clock,
    slots: int = 0,
) -> tuple[list[Episode], Scores]:
    """Plays `samples` episodes of each problem, of at most `pool.task.max_turns` turns.

    An episode whose next prompt, the conversation so far, has more tokens than `encoder.width` ends
    there, truncated.

    Args:
        engine, encoder, pool: who answers, in which tokens, and who plays the environments.
        examples: problems with distinct indices.
        samples: episodes of each.
        sampling: of one turn.
        key: fixes the draws.
        clock: gets the times of generation and of the environments.
        slots: height of the engine's batch, where it is more than the episodes.

    Returns:
        Episodes [len(examples) * samples], episode b of example b // samples; and their scores.

    Raises:
        UserError: the workers ended and could not be started again, or the chat template refuses a
            conversation.
    """
    max_turns = pool.task.max_turns
    episodes = [Episode(example) for example in examples for _ in range(samples)]
    ids = [example.index * samples + sample for example in examples for sample in range(samples)]
    prompts = [encoder.next_turn(episode) for episode in episodes]
    scores: list[Scores] = []
    for turn in range(max_turns):
        live = [i for i, episode in enumerate(episodes) if not episode.done]
        if not live:
            break
        filled = live + [live[0]] * (max(slots, len(episodes)) - len(live))
        with clock.part("gen"):
            width = _width(max(len(prompts[i]) for i in live), encoder.width)
            batch = pad_prompts(
                [prompts[i] for i in filled], [ids[i] for i in filled], width, encoder.pad
            )
            rollout = engine.generate(batch, 1, sampling, jax.random.fold_in(key, turn))
            sampled = _turns(rollout, [prompts[i] for i in live])
        texts = [encoder.tokenizer.decode(turn.tokens) for turn in sampled]
        with clock.part("reward"):
            scores.append(play_distributed(pool, [episodes[i] for i in live], texts))
        for i, said, text, result in zip(live, sampled, texts, scores[-1].turns, strict=True):
            episodes[i] = episodes[i].after(said, text, result, max_turns)
            if not episodes[i].done:
                prompts[i] = encoder.next_turn(episodes[i])
                if len(prompts[i]) > encoder.width:
                    episodes[i] = episodes[i].cut()
    return episodes, episode_scores(episodes, scores, pool.task.reward.partial_credit)


def _width(longest: int, whole: int) -> int:
    return next(width for part in WIDTHS if (width := -(-whole // part)) >= longest)


def _turns(rollout: Rollout, prompts: list[list[int]]) -> list[Sampled]:
    """What the first rows sampled, whose prompts these are."""
    arrays = (
        rollout.tokens,
        rollout.behaviour_logprobs,
        rollout.policy_logprobs,
        rollout.mask,
        rollout.stopped,
    )
    tokens, behaviour, policy, mask, stopped = map(np.asarray, to_host(arrays))
    return [
        Sampled(
            prompt=tuple(prompt),
            tokens=tuple(tokens[row][mask[row]].tolist()),
            behaviour_logprobs=tuple(behaviour[row][mask[row]].tolist()),
            policy_logprobs=tuple(policy[row][mask[row]].tolist()),
            stopped=bool(stopped[row]),
            weight_version=rollout.weight_version,
        )
        for row, prompt in enumerate(prompts)
    ]

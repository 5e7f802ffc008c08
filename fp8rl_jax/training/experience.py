"""What was sampled in one step, and the batch that it makes for the trainer.

A sample is a completion, or an episode of several. Rewards and advantages belong to samples; the
trainer works on rows. A completion is one row. An episode is as many as `join_turns` makes of it,
and a batch of them is filled up with empty rows.

Episodes are played here, too: the policy and the environments take turns, all episodes side by
side. A turn is one call of the engine on the conversations so far. The batch keeps its height: in
place of episodes that have ended one that goes on is repeated, draw by draw, so it takes no longer.
Its width is one of a few, so a run compiles few programs. What an episode draws depends on (key,
problem, sample, turn) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fp8rl_jax import rl
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.parallel import to_global, to_host
from fp8rl_jax.rollout.engine import Prompts, Rollout, RolloutEngine, fraction_of, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.distributed import play_distributed
from fp8rl_jax.tasks.episodes import Episode, Row, Sampled, episode_scores, join_turns
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.prompts import PromptEncoder

Entering = Bool[np.ndarray, " c"] | None
"""Samples that enter the loss; None: all of them."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """C samples of P prompts, sample c of prompt c // samples: what a session gives to be rewarded
    and takes back to learn from.

    Attributes:
        texts: [C], completions without special tokens, or transcripts of episodes.
        samples: of each prompt.
        temperature: that they were sampled at.
        rollout: the rows, on the mesh. They may be more than the samples: the session fills a batch
            up, so that a compiled program serves several sizes.
        episodes: [C], where the samples are episodes.
        sample_of_row: of episodes, the sample that each row belongs to, -1 for an empty row. None:
            row c is sample c, and those behind the last sample are empty.
        attended: of episodes, the tokens that are there: sampled ones and observations.
        truncated: whether they were drawn from another distribution than the policy's.
    """

    texts: list[str]
    samples: int
    temperature: float
    rollout: Rollout
    episodes: Sequence[Episode] | None = None
    sample_of_row: Int[np.ndarray, " b"] | None = None
    attended: Bool[Array, "b t"] | None = None
    truncated: bool = False

    @property
    def prompts(self) -> int:
        """P."""
        return len(self.texts) // self.samples

    @property
    def prompt_ids(self) -> list[int]:
        """Of each prompt, an `Example`'s index or the place in the call that gave it, [P]; all
        processes call it together."""
        return to_host(self.rollout.prompts.ids)[: self.prompts].tolist()

    def repeated[T](self, values: Sequence[T]) -> list[T]:
        """Repeat what belongs to a prompt, such as its answer, for each of its completions, as TRL
        hands columns to reward functions.

        Args:
            values: [P], in the order of the prompts (of `prompt_ids`).

        Returns:
            [C], beside `texts`.

        Raises:
            UserError: they are not P.
        """
        if len(values) != self.prompts:
            raise UserError(
                f"values: expected {self.prompts}, one for each prompt, got {len(values)}"
            )
        return [value for value in values for _ in range(self.samples)]

    @property
    def prompts_in_batch(self) -> int:
        """P, and with it what the batch is filled up with."""
        return self.prompts if self.episodes else len(self.rollout.prompts.lengths)

    @property
    def weight_version(self) -> int:
        """Number of the weight sync that served it; of an episode's turns the oldest."""
        return self.rollout.weight_version

    @property
    def tokens(self) -> list[list[int]]:
        """Sampled token ids of each sample, [C][length], the stop token included; all processes
        call it together."""
        return [row.tolist() for row in self._by_sample_on_host(self.rollout.tokens)]

    @property
    def logprobs(self) -> list[Float[np.ndarray, " length"]]:
        """Log-probability of each of `tokens` in the rollout, at the sampling temperature over the
        whole vocabulary; all processes call it together."""
        return self._by_sample_on_host(self.rollout.policy_logprobs)

    @property
    def policy_logprobs(self) -> Float[Array, "b t"]:
        """The rollout's, over the whole vocabulary, in the rows of `batch`."""
        return self.rollout.policy_logprobs

    @property
    def scored_logprobs(self) -> Float[Array, "b t"]:
        """The rollout's of what `Session.score` computes, in the rows of `batch`: over each token's
        support where the rollout has it, else over the whole vocabulary."""
        rollout = self.rollout
        return rollout.policy_logprobs if rollout.support is None else rollout.behaviour_logprobs

    def batch(self, config: RLConfig, entering: Entering = None) -> Batch:
        """Make the rows to train on, with advantages of 0.

        Args:
            config: its correction resolved.
            entering: samples in the loss.

        Raises:
            UserError: truncated samples that `config` does not allow, or without their supports
                where it replays them.
        """
        rollout, in_loss = self.rollout, None
        if (
            self.truncated
            and config.correction.truncated_sampling == "replay"
            and rollout.support is None
        ):
            raise UserError(
                'rl.correction.truncated_sampling: "replay" needs the support of each token, and '
                'the engine brought none; take rollout.engine = "static" or "paged"'
            )
        chosen = rl.rollout_logprobs(
            rollout.behaviour_logprobs,
            rollout.policy_logprobs,
            config.correction,
            truncated=self.truncated,
        )
        mask, rows = rollout.mask, len(rollout.tokens)
        if self.sample_of_row is None and len(self.texts) < rows:
            mask = mask & (np.arange(rows) < len(self.texts))[:, None]
        if config.overlong.filter and self.episodes is None:
            in_loss = rl.drop_truncated(mask, rollout.stopped)
        if entering is not None and not entering.all():
            inside = self._spread(entering.astype(np.float32)) > 0
            in_loss = (mask if in_loss is None else in_loss) & inside[:, None]
        prompts = rollout.prompts
        return Batch(
            prompts.tokens,
            prompts.lengths,
            rollout.tokens,
            mask,
            chosen,
            jnp.zeros_like(chosen[:, 0]),
            attended=self.attended,
            loss_mask=in_loss,
            prompt_routes=rollout.prompt_expert_ids,
            routes=rollout.expert_ids,
            support=rollout.support,
        )

    def by_sample(self, values: Shaped[Array, " b"]) -> Shaped[Array, " c"]:
        """Sum over the rows of each sample, filling included; all processes call it together."""
        if self.sample_of_row is None:
            return values
        own, values = self.sample_of_row >= 0, to_host(values)
        sums = np.zeros(len(self.texts), values.dtype)
        np.add.at(sums, self.sample_of_row[own], values[own])
        return jnp.asarray(sums)

    def by_row(self, values: Float[Array, " c"]) -> Float[Array, " b"]:
        """Give each row its sample's value, 0 to an empty row; all processes call it together."""
        if self.sample_of_row is None:
            return values
        return to_global(self._spread(to_host(values)), self.rollout.tokens.sharding)

    def work(self) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " b"], int]:
        """Count what was sampled and what it stands behind, for `Clock.work`.

        Gives the lengths of prompts and of what follows them, and the number of sampled tokens.
        """
        there = self.rollout.mask if self.attended is None else self.attended
        prompts, there, mask = to_host((self.rollout.prompts.lengths, there, self.rollout.mask))
        if self.sample_of_row is None:
            mask = mask[: len(self.texts)]
            return prompts[: self.prompts], mask.sum(1), int(mask.sum())
        own = self.sample_of_row >= 0
        return prompts[own], there[own].sum(1), int(mask.sum())

    def metrics(self) -> dict[str, float]:
        """Compute completions/* and rollout/*.

        Of supports rollout/support_mean, the tokens that one could have been, and
        rollout/support_capped, the part of the tokens for which truncation kept more than a
        support holds, so that the sampler drew from the likeliest of them alone.

        Of episodes also their turns and rows (one row: all turns were joined), and the part that
        ended for want of room.
        """
        version = {"rollout/weight_version": float(self.weight_version)}
        version |= {name: float(value) for name, value in to_host(self.rollout.metrics).items()}
        if (support := self.rollout.support) is not None:
            count, mask = to_host((support.count, self.rollout.mask))
            version |= _support_metrics(count[mask], support.ids.shape[-1])
        if self.episodes is None:
            mask, stopped = to_host((self.rollout.mask, self.rollout.stopped))
            count = len(self.texts)
            return _completion_metrics(mask[:count].sum(1), stopped[:count]) | version
        turns, count = [turn for e in self.episodes for turn in e.turns], len(self.episodes)
        lengths = np.array([len(turn.tokens) for turn in turns])
        stopped = np.array([turn.stopped for turn in turns])
        return (
            _completion_metrics(lengths, stopped)
            | version
            | {
                "episodes/turns": len(turns) / count,
                "episodes/rows": np.sum(np.asarray(self.sample_of_row) >= 0) / count,
                "episodes/truncated": sum(e.truncated for e in self.episodes) / count,
            }
        )

    def _by_sample_on_host(self, values: Array) -> list[np.ndarray]:
        """Values of the sampled tokens of each sample, in their order."""
        values, mask = to_host((values, self.rollout.mask))
        sample = np.arange(len(mask)) if self.sample_of_row is None else self.sample_of_row
        parts: list[list[np.ndarray]] = [[] for _ in self.texts]
        for row in np.flatnonzero((sample >= 0) & (sample < len(parts))):
            parts[sample[row]].append(values[row][mask[row]])
        return [np.concatenate(part) for part in parts]

    def _spread(self, values: Float[np.ndarray, " c"]) -> Float[np.ndarray, " b"]:
        """The value of each row's sample, on the host, 0 for an empty row."""
        if self.sample_of_row is None:
            return np.pad(values, (0, len(self.rollout.tokens) - len(values)))
        own = self.sample_of_row >= 0
        return np.where(own, values[self.sample_of_row], 0).astype(np.float32)


def episode_experience(
    episodes: Sequence[Episode],
    samples: int,
    temperature: float,
    width: int,
    pad: int,
    sharding: jax.sharding.Sharding,
    multiple: int | None = None,
    truncated: bool = False,
) -> Experience:
    """Make the rows of episodes, padded: position t of a row stands at prompt_length + t.

    The two parts of a row, prompt and what follows, have to hold any conversation. One token is the
    shortest prompt, and with it the parts together are no wider than the longest conversation,
    wherever its first answer begins; what a prompt has beyond it stands in front of the row's
    tokens, attended to and not sampled. Empty rows, whose prompt is one pad, stand evenly between
    the others, so that equal parts of the rows have about equally many that are not.

    Args:
        episodes: ended or not.
        samples: of each prompt.
        temperature: that they were sampled at.
        width: columns behind a prompt, at least the longest row of tokens.
        pad: token id of the padding.
        sharding: of the rows.
        multiple: the number of rows is a multiple of it; default: of the number of episodes.
        truncated: as in `Experience`.

    Raises:
        ValueError: a row does not fit.
    """
    rows = [
        (index, _behind_one_token(row))
        for index, episode in enumerate(episodes)
        for row in join_turns(episode.turns)
    ]
    for index, row in rows:
        if len(row.tokens) > width:
            raise ValueError(
                f"episode {index}: a row of 1 + {len(row.tokens)} tokens, and there is room for "
                f"1 + {width}"
            )
    multiple = len(episodes) if multiple is None else multiple
    height = -(-len(rows) // multiple) * multiple
    slots = np.arange(len(rows)) * height // len(rows)

    def column(values: Sequence[int], fill: int) -> Any:
        filled = np.full(height, fill, np.int32)
        filled[slots] = values
        return filled

    def table(name: str, columns: int, fill: int | float | bool, dtype: type, *rest: int) -> Any:
        filled = np.full((height, columns, *rest), fill, dtype)
        for slot, (_, row) in zip(slots, rows, strict=True):
            filled[slot, : len(getattr(row, name))] = getattr(row, name)
        return filled

    attended = np.arange(width) < column([len(row.tokens) for _, row in rows], 0)[:, None]
    one: Any = np.ones(height, np.int32)
    support = next((turn.support for e in episodes for turn in e.turns), None)
    if support is not None:
        size = support.ids.shape[-1]
        ids = table("support_ids", width, 0, np.int32, size)
        support = Support(ids, table("support_counts", width, 0, np.int32))
    prompts = Prompts(table("prompt", 1, pad, np.int32), one, column(range(len(rows)), -1))
    rollout = Rollout(
        prompts=prompts,
        tokens=table("tokens", width, pad, np.int32),
        mask=table("sampled", width, False, bool),
        behaviour_logprobs=table("behaviour_logprobs", width, 0.0, np.float32),
        policy_logprobs=table("policy_logprobs", width, 0.0, np.float32),
        stopped=one > 0,
        weight_version=min(turn.weight_version for e in episodes for turn in e.turns),
        support=support,
    )
    rollout, attended = to_global((rollout, attended), sharding)
    return Experience(
        texts=[episode.transcript for episode in episodes],
        samples=samples,
        temperature=temperature,
        rollout=rollout,
        episodes=episodes,
        sample_of_row=column([index for index, _ in rows], -1),
        attended=attended,
        truncated=truncated,
    )


def _behind_one_token(row: Row) -> Row:
    """`row` with a prompt of one token; the others stand in front of its tokens."""
    beyond = row.prompt[1:]
    zeros, nothing = [0.0] * len(beyond), [np.zeros_like(x) for x in row.support_ids[:1]]
    return Row(
        row.prompt[:1],
        [*beyond, *row.tokens],
        [False] * len(beyond) + row.sampled,
        zeros + row.behaviour_logprobs,
        zeros + row.policy_logprobs,
        nothing * len(beyond) + row.support_ids,
        [0] * len(beyond) * len(nothing) + row.support_counts,
    )


def _support_metrics(count: Int[np.ndarray, " n"], most: int) -> dict[str, float]:
    """Of n tokens, what truncation kept of each, and how many a support holds."""
    return {
        "rollout/support_mean": float(np.minimum(count, most).mean()),
        "rollout/support_capped": float((count > most).mean()),
    }


def _completion_metrics(
    lengths: Int[np.ndarray, " b"], stopped: Bool[np.ndarray, " b"]
) -> dict[str, float]:
    return {
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/mean_terminated_length": lengths[stopped].mean() if stopped.any() else 0.0,
        "completions/clipped_ratio": 1.0 - stopped.mean(),
    }


_WIDTHS = (4, 2, 1)
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
    """Play `samples` episodes of each problem, of at most `pool.task.max_turns` turns.

    An episode whose next prompt, the conversation so far, has more tokens than `encoder.width` ends
    there, truncated; an environment of `verifiers` then scores it as it is.

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
    with engine.conversations(encoder.width):
        for turn in range(max_turns):
            live = [i for i, episode in enumerate(episodes) if not episode.done]
            if not live:
                break
            filled = live + [live[0]] * (max(slots, len(episodes)) - len(live))
            with clock.enter("gen"):
                width = fraction_of(encoder.width, max(len(prompts[i]) for i in live), _WIDTHS)
                batch = pad_prompts(
                    [prompts[i] for i in filled], [ids[i] for i in filled], width, encoder.pad
                )
                rollout = engine.generate(batch, 1, sampling, jax.random.fold_in(key, turn))
                sampled = _turns(rollout, [prompts[i] for i in live])
            texts = [encoder.tokenizer.decode(turn.tokens) for turn in sampled]
            with clock.enter("reward"):
                scores.append(play_distributed(pool, [episodes[i] for i in live], texts))
            for i, said, text, result in zip(live, sampled, texts, scores[-1].turns, strict=True):
                episodes[i] = episodes[i].after(said, text, result, max_turns)
                if not episodes[i].done:
                    prompts[i] = encoder.next_turn(episodes[i])
                    if len(prompts[i]) > encoder.width:
                        episodes[i] = episodes[i].truncate()
            cut = [i for i in live if episodes[i].truncated]
            if cut and pool.task.kind == "verifiers":  # rewarded at the end alone
                with clock.enter("reward"):
                    ends = play_distributed(pool, [episodes[i] for i in cut], [None] * len(cut))
                scores.append(ends)
                for i, end in zip(cut, ends.turns, strict=True):
                    episodes[i] = episodes[i].concluded(end)
    return episodes, episode_scores(episodes, scores, pool.task.reward.partial_credit)


def _turns(rollout: Rollout, prompts: list[list[int]]) -> list[Sampled]:
    """What the first rows sampled, whose prompts these are."""
    arrays = (
        rollout.tokens,
        rollout.behaviour_logprobs,
        rollout.policy_logprobs,
        rollout.mask,
        rollout.stopped,
        rollout.support,
    )
    tokens, behaviour, policy, mask, stopped, support = jax.tree.map(np.asarray, to_host(arrays))
    return [
        Sampled(
            prompt=tuple(prompt),
            tokens=tuple(tokens[row][mask[row]].tolist()),
            behaviour_logprobs=tuple(behaviour[row][mask[row]].tolist()),
            policy_logprobs=tuple(policy[row][mask[row]].tolist()),
            stopped=bool(stopped[row]),
            weight_version=rollout.weight_version,
            support=jax.tree.map(lambda x, row=row: x[row][mask[row]], support),
        )
        for row, prompt in enumerate(prompts)
    ]

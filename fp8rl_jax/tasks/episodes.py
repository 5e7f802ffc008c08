"""Episodes: conversations of a model with an environment, turn by turn, and what of their tokens is
trained on.

The sampler knows prompts and completions, so every turn is a prompt of its own: the whole
conversation so far. For training the turns of an episode are joined again. As long as the tokens of
a turn's prompt begin with the tokens of the turn before (its prompt, then exactly the tokens that
were sampled), they share one row:

    prompt | completion 1, observation 1, completion 2, observation 2, completion 3
             1 1 1 1 1 1 1 0 0 0 0 0 0 0  1 1 1 1 1 1 1 0 0 0 0 0 0 0  1 1 1 1 1 1    sampled: in
                                          the loss

A chat template may write the past anew (it drops earlier reasoning, say), and text does not always
come back as the tokens that were sampled. Then a new row begins at that turn, so that every token
stays in the context that it was sampled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from fp8rl_jax.tasks.conversation import Conversation, chat_messages, transcript
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.scores import Scores, metrics_of

if TYPE_CHECKING:
    from fp8rl_jax.models.logprobs import Support


@dataclass(frozen=True)
class Sampled:
    """The tokens of one turn, as the engine was given them and as it sampled them."""

    prompt: tuple[int, ...]
    """The whole conversation so far."""
    tokens: tuple[int, ...]
    """The completion, its stop token included."""
    behaviour_logprobs: tuple[float, ...]
    """Of the distribution that was sampled, one a token."""
    policy_logprobs: tuple[float, ...]
    """At the same temperature over the whole vocabulary."""
    stopped: bool
    """A stop token ended it; otherwise its length did."""
    weight_version: int
    """Number of the weight sync that served it."""
    support: Support | None = field(default=None, compare=False)
    """What each token could have been, numpy [t, k] and [t]; None where the engine keeps none."""


@dataclass(frozen=True)
class Episode:
    """One conversation; `after` gives the next state."""

    example: Example
    turns: tuple[Sampled, ...] = ()
    history: tuple[tuple[str, tuple[dict[str, str], ...]], ...] = ()
    """(completion, observation) of each turn; a last one has no observation."""
    reward: float = 0.0
    """Sum over the turns; 0 after a failure."""
    done: bool = False
    """No further turn: the environment said so, there were max_turns, a turn failed, or there was
    no room for another."""
    failed: bool = False
    """A turn raised, timed out, or broke the protocol: the episode has no reward of its own."""
    truncated: bool = False
    """It ended for want of room, with the reward that it had by then."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment's last turn brought besides."""

    @property
    def prompt(self) -> str:
        """The next turn's prompt: what `PromptEncoder` takes as an example's."""
        if not self.history:
            return self.example.prompt
        messages: list[dict[str, str]] = chat_messages(self.example.prompt)
        for completion, observation in self.history:
            messages += [{"role": "assistant", "content": completion}, *observation]
        return Conversation(messages)

    @property
    def next_example(self) -> Example:
        """The episode's problem with the next turn's prompt."""
        return replace(self.example, prompt=self.prompt)

    @property
    def transcript(self) -> str:
        """Completions and the observations between them, a line a message."""
        messages = [
            message
            for completion, observation in self.history
            for message in ({"role": "assistant", "content": completion}, *observation)
        ]
        return transcript(messages).removeprefix("assistant: ")

    def truncate(self) -> Episode:
        """End the episode for want of room."""
        return replace(self, done=True, truncated=True)

    def concluded(self, turn: dict[str, Any] | None) -> Episode:
        """Return a truncated episode with what its environment scores it; None: that failed."""
        failed = turn is None
        return replace(
            self,
            reward=0.0 if failed else self.reward + turn["reward"],
            failed=failed,
            metrics={} if failed else turn.get("metrics", {}),
        )

    def after(
        self, sampled: Sampled, completion: str, turn: dict[str, Any] | None, max_turns: int
    ) -> Episode:
        """Return the episode after a turn.

        `turn` is what the environment made of the completion, None where that failed.
        """
        if self.done:
            raise ValueError("the episode has ended")
        failed = turn is None
        turn = turn or {"observation": (), "reward": 0.0, "done": True}
        return replace(
            self,
            turns=(*self.turns, sampled),
            history=(*self.history, (completion, tuple(turn["observation"]))),
            reward=0.0 if failed else self.reward + turn["reward"],
            done=turn["done"] or len(self.turns) + 1 == max_turns,
            failed=failed,
            metrics=turn.get("metrics", {}),
        )


def episode_scores(
    episodes: Sequence[Episode], turns: Sequence[Scores], partial_credit: bool
) -> Scores:
    """Compute the scores of whole episodes from those of their turns.

    Rewards are sums, and an episode is correct from a sum of 1 on. Metrics are those of last turns.
    """
    sums = np.array([episode.reward for episode in episodes], np.float64)
    failed = np.array([episode.failed for episode in episodes], bool)
    correct = (sums >= 1.0) & ~failed
    rewards = (sums if partial_credit else correct).astype(np.float32)
    return Scores(
        rewards=rewards,
        components=metrics_of([{"metrics": episode.metrics} for episode in episodes])
        | {"environment": sums.astype(np.float32)},
        correct=correct,
        failed=failed,
        errors=sum(turn.errors for turn in turns),
        timeouts=sum(turn.timeouts for turn in turns),
        first_error=next((turn.first_error for turn in turns if turn.first_error), ""),
        seconds=sum(turn.seconds for turn in turns),
    )


@dataclass(frozen=True)
class Row:
    """Tokens behind one prompt, sampled ones and observations."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    behaviour_logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    support_ids: list[Int[np.ndarray, " k"]] = field(default_factory=list)
    """Of each token, as `Sampled.support` has them; 0 of observations. Empty where there are
    none, as are the counts."""
    support_counts: list[int] = field(default_factory=list)


def join_turns(turns: Sequence[Sampled]) -> list[Row]:
    """Join turns to the fewest rows in which every sampled token has its own context.

    That is the context that it was sampled in.
    """
    rows: list[Row] = []
    for turn in turns:
        if len(turn.tokens) != len(turn.behaviour_logprobs) or len(turn.tokens) != len(
            turn.policy_logprobs
        ):
            raise ValueError("a turn needs one log-probability of each kind for each of its tokens")
        context = (*rows[-1].prompt, *rows[-1].tokens) if rows else ()
        if not rows or turn.prompt[: len(context)] != context:
            rows.append(Row(turn.prompt))
            context = turn.prompt
        observation = turn.prompt[len(context) :]
        for tokens, sampled, behaviour, policy in (
            (observation, False, (0.0,) * len(observation), (0.0,) * len(observation)),
            (turn.tokens, True, turn.behaviour_logprobs, turn.policy_logprobs),
        ):
            rows[-1].tokens.extend(tokens)
            rows[-1].sampled.extend([sampled] * len(tokens))
            rows[-1].behaviour_logprobs.extend(behaviour)
            rows[-1].policy_logprobs.extend(policy)
        if turn.support is not None:
            ids, counts = turn.support
            rows[-1].support_ids.extend([np.zeros_like(ids[0])] * len(observation) + list(ids))
            rows[-1].support_counts.extend([0] * len(observation) + counts.tolist())
    return rows

"""Playing episodes: the policy and the environments take turns, all episodes side by side.

A turn is one call of the engine on the conversations so far. The batch keeps its height: in place
of episodes that have ended one that goes on is repeated, draw by draw, so it takes no longer. Its
width is one of WIDTHS, so a run compiles a few programs. What an episode draws depends on (key,
problem, sample, turn) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Key

from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Rollout, RolloutEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.distributed import play_distributed
from fp8rl_jax.tasks.episodes import Episode, Sampled, episode_scores
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.prompts import PromptEncoder

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
                    episodes[i] = episodes[i].truncate()
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

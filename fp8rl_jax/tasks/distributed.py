"""Rewards in a run of several processes: each scores its share, and all get the whole, counts and
times included.

A reward need not be deterministic, and it may time out on one host alone; what is shared is equal
everywhere. All processes must call these functions together with the same arguments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import jax
import numpy as np

from fp8rl_jax.parallel import PROGRESS, gather_text, shared_faults, sum_over_processes
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores


def score_distributed(
    pool: RewardPool, examples: Sequence[Example], completions: Sequence[str]
) -> Scores:
    """Score completions as `pool.score` does, each process its share.

    Raises:
        UserError: on every process, where the workers of one ended and could not be started again.
    """
    started, rows = time.monotonic(), _share(len(completions))
    repeats = len(completions) // max(len(examples), 1)
    with shared_faults(), PROGRESS.taking(_longest(pool, len(rows))):
        own = pool.score(
            [examples[row // repeats] for row in rows], [completions[row] for row in rows]
        )
    shares = [json.loads(x) for x in gather_text(json.dumps([own.first_error, *own.components]))]
    first_error = next((error for error, *_ in shares if error), "")
    # a process whose turns all failed knows no metric of its environment
    names = list(dict.fromkeys(name for _, *known in shares for name in known))
    table = np.zeros((3 + len(names), len(completions)), np.float32)
    scored = [own.components.get(name, np.zeros_like(own.rewards)) for name in names]
    table[:, rows] = own.rewards, own.correct, own.failed, *scored
    (rewards, correct, failed, *components), timeouts = sum_over_processes(
        (table, np.int32(own.timeouts))
    )
    return Scores(
        rewards=rewards,
        components=dict(zip(names, components, strict=True)),
        correct=correct > 0,
        failed=failed > 0,
        errors=int(failed.sum() - timeouts),
        timeouts=int(timeouts),
        first_error=first_error,
        seconds=time.monotonic() - started,
    )


def play_distributed(
    pool: RewardPool, episodes: Sequence[Episode], completions: Sequence[str | None]
) -> Scores:
    """Play a turn as `pool.play` does, each process its share.

    Raises:
        UserError: on every process, where the workers of one ended and could not be started again.
    """
    started, rows = time.monotonic(), _share(len(completions))
    with shared_faults(), PROGRESS.taking(_longest(pool, len(rows))):
        own = pool.play([episodes[row] for row in rows], [completions[row] for row in rows])
    shared = {name: getattr(own, name) for name in ("turns", "timeouts", "first_error")}
    shares = [json.loads(text) for text in gather_text(json.dumps(shared))]
    turns = [
        shares[row % len(shares)]["turns"][row // len(shares)] for row in range(len(completions))
    ]
    rewards = np.array([turn["reward"] if turn else 0.0 for turn in turns], np.float32)
    failed = np.array([turn is None for turn in turns], bool)
    timeouts = sum(share["timeouts"] for share in shares)
    return Scores(
        rewards=rewards,
        components={"environment": rewards},
        correct=(rewards >= 1.0) & ~failed,
        failed=failed,
        errors=int(failed.sum()) - timeouts,
        timeouts=timeouts,
        first_error=next((share["first_error"] for share in shares if share["first_error"]), ""),
        seconds=time.monotonic() - started,
        turns=turns,
    )


def _share(count: int) -> np.ndarray:
    """This process's rows: dealt out like cards, so that each has its part of every prompt's
    completions."""
    return np.arange(jax.process_index(), count, jax.process_count())


def _longest(pool: RewardPool, samples: int) -> float:
    """Seconds until all have ended or timed out."""
    reward = pool.task.reward
    return reward.timeout * -(-samples // reward.num_workers)

"""Held-out evaluation: avg@k and pass@k with intervals."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Key

from fp8rl_jax.config.training import EvaluationConfig
from fp8rl_jax.parallel import is_main_process, to_host
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.distributed import score_distributed
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.play import play
from fp8rl_jax.training.session import Session, at_temperature
from fp8rl_jax.training.setup import Setup

_log = logging.getLogger("fp8rl")


def evaluate(
    session: Session,
    pool: RewardPool,
    examples: Sequence[Example],
    config: EvaluationConfig,
    key: Key[Array, ""],
) -> tuple[dict[str, float], list[dict]]:
    """Answers every example `config.samples` times, or plays as many episodes of it, and scores the
    answers.

    Args:
        session: answers with the weights that it serves, which do not change.
        pool: scores, or plays the environments.
        examples: problems.
        config: how many samples, at which temperature; nothing else of the session's sampling is
            truncated or biased.
        key: fixes the draws.

    Returns:
        Metrics `eval/accuracy` (avg@k: mean of correct samples; pass@1), `eval/accuracy_low`,
        `eval/accuracy_high` (95 % Wilson interval over examples, samples of an example averaged),
        `eval/problems` (their number), `eval/pass_at_k` where k > 1, `eval/mean_length`,
        `eval/failed_rewards` (answers whose reward failed, which count as wrong; the first failure
        is logged); and one row an answer: prompt, completion, answer, reward.
    """
    prompts_a_batch, sampling = (
        max(config.batch_size // config.samples, 1),
        at_temperature(session.sampling, config.temperature),
    )
    found, lengths, rows = [], [], []
    for start in range(0, len(examples), prompts_a_batch):
        part = list(examples[start : start + prompts_a_batch])
        answer = _play if pool.task.max_turns > 1 else _complete
        with jax.set_mesh(session.mesh):
            scores, texts, tokens = answer(
                session, pool, part, prompts_a_batch, config.samples, sampling, key
            )
        found.append(scores)
        lengths.append(tokens)
        for row, text in enumerate(texts):
            example = part[row // config.samples]
            rows.append(
                {
                    "prompt": example.prompt,
                    "completion": text,
                    "answer": example.answer,
                    "reward": float(scores.rewards[row]),
                }
            )
    scores = Scores.join(found)
    if (line := scores.failure_text()) and is_main_process():
        _log.warning("evaluation: %s", line)
    table = scores.correct.reshape(len(examples), config.samples).astype(np.float64)
    accuracy = float(table.mean())
    low, high = wilson_interval(accuracy, len(table))
    metrics = {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/problems": float(len(table)),
        "eval/mean_length": float(np.concatenate(lengths).mean()),
        "eval/failed_rewards": float(scores.failed.sum()),
    }
    if config.samples > 1:
        metrics["eval/pass_at_k"] = float(table.max(1).mean())
    return metrics, rows


def _complete(
    session, pool, part, prompts, samples, sampling, key
) -> tuple[Scores, list[str], np.ndarray]:
    """Scores, texts and token counts of the answers to `part`, which is one batch of `prompts` or
    the rest of one."""
    # filled up with its first example, so that one compiled program serves all
    filled = part + part[:1] * (prompts - len(part))
    rollout = session.engine.generate(session.encoder.batch(filled), samples, sampling, key)
    texts = session.encoder.texts(rollout)[: len(part) * samples]
    return score_distributed(pool, part, texts), texts, to_host(rollout.mask).sum(1)[: len(texts)]


def _play(
    session, pool, part, prompts, samples, sampling, key
) -> tuple[Scores, list[str], np.ndarray]:
    """The same of episodes: an episode's tokens are those of all its completions."""
    slots = prompts * samples
    episodes, scores = play(
        session.engine, session.encoder, pool, part, samples, sampling, key, Clock(), slots=slots
    )
    tokens = np.array([sum(len(turn.tokens) for turn in episode.turns) for episode in episodes])
    return scores, [episode.transcript for episode in episodes], tokens


def evaluate_held_out(setup: Setup, pool: RewardPool) -> dict[str, float]:
    """`evaluate` of a run's policy on its held-out set; an FP8 cache is calibrated on the prompts.

    Raises:
        UserError: weights or scales that are not finite after quantization.
    """
    config, session = setup.config.evaluation, setup.session
    examples = setup.held_out.examples[: config.examples]
    session.sync(session.encoder.batch(examples[: config.batch_size]))
    return evaluate(session, pool, examples, config, jax.random.key(setup.config.seed))[0]


def wilson_interval(rate: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, 1927); z = 1.96 for 95 %."""
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    )
    return max(centre - half, 0.0), min(centre + half, 1.0)

"""Held-out evaluation: avg@k and pass@k with intervals."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from fp8rl_jax.config.training import EvaluationConfig
from fp8rl_jax.parallel import is_main_process, to_host
from fp8rl_jax.rollout.sampling import at_temperature
from fp8rl_jax.statistics import wilson_interval
from fp8rl_jax.tasks.dataset import Dataset, Example
from fp8rl_jax.tasks.distributed import score_distributed
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.experience import play
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import Setup

_log = logging.getLogger("fp8rl")


@dataclass(frozen=True)
class Evaluation:
    """Answers to held-out problems, scored."""

    metrics: dict[str, float]
    """`eval/accuracy` (avg@k: mean of correct samples; pass@1), `eval/accuracy_low`,
    `eval/accuracy_high` (95 % Wilson interval over problems, samples of a problem averaged),
    `eval/problems` (their number), `eval/pass_at_k` where k > 1, `eval/mean_length`,
    `eval/failed_rewards` (answers whose reward failed, which count as wrong)."""
    correct: Int[np.ndarray, " problems"]
    """Right answers to each problem, of `samples`."""
    samples: int
    problems: str
    """SHA-256 of the problems, first 16 digits: what `correct` counts."""
    answers: list[dict]
    """One row an answer: prompt, completion, answer, reward."""

    @property
    def row(self) -> dict:
        """As evaluations.jsonl has it."""
        return {
            "problems": self.problems,
            "samples": self.samples,
            "correct": self.correct.tolist(),
        }


def evaluate(
    session: Session,
    pool: RewardPool,
    examples: Sequence[Example],
    config: EvaluationConfig,
    key: Key[Array, ""],
) -> Evaluation:
    """Answer every example `config.samples` times, or play episodes, and score the answers.

    The first failure of a reward is logged.

    Args:
        session: answers with the weights that it serves, which do not change.
        pool: scores, or plays the environments.
        examples: problems.
        config: how many samples, at which temperature; nothing else of the session's sampling is
            truncated or biased.
        key: fixes the draws.
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
    problems = Dataset(tuple(examples)).fingerprint[:16]
    return Evaluation(metrics, table.sum(1).astype(int), config.samples, problems, rows)


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


def evaluate_held_out(setup: Setup, pool: RewardPool) -> Evaluation:
    """Evaluate a run's policy on its held-out set.

    An FP8 cache is calibrated on the prompts.

    Raises:
        UserError: weights or scales that are not finite after quantization.
    """
    assert isinstance(setup.held_out, Dataset)
    config, session = setup.config.evaluation, setup.session
    examples = setup.held_out.examples[: config.examples]
    session.sync(session.encoder.batch(examples[: config.batch_size]))
    return evaluate(session, pool, examples, config, jax.random.key(setup.config.seed))

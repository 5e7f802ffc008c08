"""One step's experience: completions of the step's prompts and their rewards, drawn once or, with
DAPO's dynamic sampling, until enough prompts are informative (arXiv 2503.14476, section 3.2).

What is drawn in round r of a step depends on (seed, step, r) alone, so a resumed run draws the
same. Metrics of rewards describe everything that was sampled; the update sees the chosen prompts,
always as many, so that one compiled program serves every step. Where too few prompts teach
something, others fill the batch, and their tokens are left out of the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from fp8rl_jax import rl
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.parallel import batch_sharding, to_global, to_host
from fp8rl_jax.rollout.engine import Prompts, Rollout
from fp8rl_jax.rollout.sampler import rows_of
from fp8rl_jax.tasks.dataset import Dataset, Example
from fp8rl_jax.tasks.distributed import score_distributed
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.experience import Experience
from fp8rl_jax.training.keys import rollout_key
from fp8rl_jax.training.session import Session


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a step learns from, C samples of P prompts chosen among all that were sampled, and what
    all of these earned.

    Attributes:
        experience: the chosen samples.
        chosen: their scores, as the task gave them.
        informative: chosen prompts that enter the loss; all of them without dynamic sampling.
        scores, examples, texts: of everything that was sampled.
        rounds: how many rollouts it took.
    """

    experience: Experience
    chosen: Scores
    informative: Bool[np.ndarray, " p"]
    scores: Scores
    examples: list[Example]
    texts: list[str]
    rounds: int

    @property
    def entering(self) -> Bool[np.ndarray, " c"]:
        """Samples that enter the loss."""
        return np.repeat(self.informative, len(self.chosen.rewards) // len(self.informative))

    def shown(self, count: int) -> Iterator[dict[str, Any]]:
        """Give rows for samples.jsonl: at most `count` of the samples, evenly spread."""
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
    """Draws experience for a run.

    Args:
        session: samples.
        train: problems.
        pool: scores.
        config: of the run.
    """

    def __init__(self, session: Session, train: Dataset, pool: RewardPool, config: RunConfig):
        self.session, self.train, self.pool, self.seed = session, train, pool, config.seed
        self.dynamic = config.rl.dynamic_sampling
        self.samples = config.rollout.samples_per_prompt
        self.count = config.rollout.prompts_per_step
        self.extra = config.rollout.paged.extra_prompts
        self.updates = config.trainer.updates_per_rollout

    def prompts(self, step: int) -> Prompts:
        """Encode the prompts of the first round of `step`."""
        return self._encoded(self._examples(step, 0))

    def collect(self, step: int) -> Collected:
        """Sample and score a step's prompts.

        With dynamic sampling, again until enough prompts are informative.
        """
        drawn = [self._draw(step, 0)]
        if not self.dynamic.enabled:
            return self._chosen(drawn, np.ones(self.count, bool))
        informative = [self._informative(drawn[0][1])]
        while sum(map(np.sum, informative)) < self.count and len(drawn) < self.dynamic.max_rounds:
            drawn.append(self._draw(step, len(drawn)))
            informative.append(self._informative(drawn[-1][1]))
        return self._chosen(drawn, np.concatenate(informative))

    def sampled_ahead(self, step: int, begun: threading.Event) -> Rollout:
        """Sample a step's completions, as `Session.rollout_ahead` does."""
        prompts = self.session.encoder.batch(self._examples(step, 0))
        return self.session.rollout_ahead(prompts, rollout_key(self.seed, step, 0), begun)

    def rewarded(self, step: int, rollout: Rollout) -> Collected:
        """Give what `collect` gives, of its completions alone; not with dynamic sampling."""
        sampled, examples = self.session.of_rollout(rollout), self._examples(step, 0)
        drawn = [(sampled, self._scores(examples, sampled), examples)]
        return self._chosen(drawn, np.ones(self.count, bool))

    def _chosen(self, drawn: list, informative: Bool[np.ndarray, " q"]) -> Collected:
        sampled, scores, examples = zip(*drawn, strict=True)
        joined = Scores.join(scores)
        # informative prompts first, each in the order of sampling; what is left over is not used
        chosen = np.argsort(~informative, kind="stable")[: self.count]
        if self.dynamic.enabled:  # dealt out, so that each update has about as many of them
            chosen = chosen.reshape(-1, self.updates).T.ravel()
        rows = rows_of(chosen, self.samples)
        return Collected(
            experience=self._picked(sampled, chosen, rows) if self.dynamic.enabled else sampled[0],
            chosen=joined.take(rows),
            informative=informative[chosen],
            scores=joined,
            examples=sum(examples, []),
            texts=sum((part.texts for part in sampled), []),
            rounds=len(drawn),
        )

    def _picked(
        self, sampled: Sequence[Experience], chosen: np.ndarray, rows: np.ndarray
    ) -> Experience:
        if sampled[0].episodes is not None:
            episodes = list(chain(*(part.episodes or () for part in sampled)))
            return self.session.of_episodes([episodes[row] for row in rows], self.samples)
        texts = list(chain(*(part.texts for part in sampled)))
        rollout = select([part.rollout for part in sampled], chosen)
        rollout = to_global(rollout, batch_sharding(self.session.mesh))
        rollout = replace(rollout, metrics=sampled[-1].rollout.metrics)
        return replace(sampled[0], rollout=rollout, texts=[texts[row] for row in rows])

    def _draw(self, step: int, number: int) -> tuple[Experience, Scores, list[Example]]:
        examples, session = self._examples(step, number), self.session
        key = rollout_key(self.seed, step, number)
        if self.pool.task.max_turns > 1:
            return *session.play(examples, self.pool, self.samples, key), examples
        if self.extra and not session.carried:
            examples = self._first_examples() + examples
        sampled = session.rollout(self._encoded(examples), self.samples, key)
        if self.extra:
            examples = [self.train[i] for i in sampled.prompt_ids]
        return sampled, self._scores(examples, sampled), examples

    def _scores(self, examples: list[Example], sampled: Experience) -> Scores:
        with self.session.clock.enter("reward"):
            return score_distributed(self.pool, examples, sampled.texts)

    def _informative(self, scores: Scores) -> Bool[np.ndarray, " p"]:
        return np.asarray(
            rl.informative_groups(
                jnp.asarray(scores.rewards), self.samples, jnp.asarray(~scores.failed)
            )
        )

    def _examples(self, step: int, number: int) -> list[Example]:
        rounds = self.dynamic.max_rounds if self.dynamic.enabled else 1
        return self._batches(step * rounds + number, self.extra, self.count)

    def _first_examples(self) -> list[Example]:
        """What is in progress beyond the first step's prompts."""
        return self._batches(0, 0, self.extra)

    def _batches(self, number: int, skipped: int, count: int) -> list[Example]:
        """`count` examples, `skipped` behind the begin of batch `number`."""
        whole, skipped = divmod(skipped, self.count)
        needed = range(number + whole, number + whole - (-(skipped + count) // self.count))
        found = chain(*(self.train.batch(i, self.count, self.seed) for i in needed))
        return list(found)[skipped : skipped + count]

    def _encoded(self, examples: list[Example]) -> Prompts:
        return to_global(self.session.encoder.batch(examples), batch_sharding(self.session.mesh))


def select(rollouts: Sequence[Rollout], prompts: np.ndarray) -> Rollout:
    """Pick prompts of several rollouts that are laid one after the other.

    Gives numpy arrays, and no metrics; all processes call it together.

    Args:
        rollouts: of the same weights and widths.
        prompts: indices into all their prompts.
    """
    parts = [replace(rollout, metrics={}) for rollout in rollouts]
    joined = jax.tree.map(lambda *leaves: np.concatenate([to_host(x) for x in leaves]), *parts)
    return joined.of_prompts(prompts)

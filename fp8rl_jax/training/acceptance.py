"""An update is taken back where the policy that is served does not keep what it promised (MIPU;
rl/acceptance.py has the paper and its formula).

After an update and its sync the new served policy samples a batch of training problems of its own,
in another order than the steps take them, and the trainer scores what it sampled. It costs a
rollout, its rewards and a forward pass in each step, and a copy of what is trained and of the
optimizer's state. Problems that are held out stay for evaluations.

What a run finds on the way is not taken back: the loss scale of float16, clip bounds, the count of
updates that schedules follow, and so the order of the data.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax import rl
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Prompts
from fp8rl_jax.tasks.dataset import Dataset
from fp8rl_jax.tasks.distributed import score_distributed
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.training.advantages import read_rewards
from fp8rl_jax.training.session import Held, Session


class Acceptance:
    """Judges a run's updates.

    Args:
        session: whose updates are judged.
        train: problems.
        pool: scores.
        config: of the run.
    """

    def __init__(self, session: Session, train: Dataset, pool: RewardPool, config: RunConfig):
        self._session, self._train, self._pool, self._config = session, train, pool, config

    def judge(self, step: int, held: Held, next_prompts: Prompts) -> dict[str, float]:
        """Keep the update of `step`, or take it back.

        Args:
            step: from 0.
            held: of the session, before the update.
            next_prompts: of the next step, which a cache is calibrated on.

        Returns:
            `optim/inference_gap`, T; `optim/gap_tolerance`, c; `optim/rejected`, 1 where the update
            was taken back, which a gap that is not finite does, too.
        """
        config, session = self._config, self._session
        gap = self._gap(step)
        tolerance = config.rl.acceptance.tolerance(step)
        if rejected := not gap >= -tolerance:
            session.go_back(held, next_prompts)
        return {
            "optim/inference_gap": gap,
            "optim/gap_tolerance": tolerance,
            "optim/rejected": float(rejected),
        }

    def _gap(self, step: int) -> float:
        """T of the weights that are served now."""
        config, session, clock = self._config, self._session, self._session.clock
        rollout = config.rollout
        examples = self._train.batch(step, rollout.prompts_per_step, config.seed + 1)
        with clock.enter("accept"):
            sampled = session.sample(
                session.encoder.batch(examples),
                rollout.samples_per_prompt,
                rollout.temperature,
                seed=step + 1,  # 0 is for evaluations
            )
            rewards = read_rewards(sampled, score_distributed(self._pool, examples, sampled.texts))
            logprobs, _ = session.score(sampled)
            with jax.set_mesh(session.mesh):
                gap = _gap_of(
                    sampled.policy_logprobs,
                    logprobs,
                    sampled.rollout.mask,
                    rewards.values,
                    rewards.valid,
                    config=config.rl,
                    samples=sampled.samples,
                )
            return float(to_host(gap))


@partial(jax.jit, static_argnames=("config", "samples"))
def _gap_of(
    rollout_logprobs: Float[Array, "b t"],
    train_logprobs: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    rewards: Float[Array, " b"],
    valid: Bool[Array, " b"],
    *,
    config: RLConfig,
    samples: int,
) -> Float[Array, ""]:
    lengths = jnp.sum(mask, axis=1)
    advantages = rl.group_advantages(rewards, samples, config.advantage, valid, lengths)
    return rl.inference_gap(rollout_logprobs, train_logprobs, mask, advantages, valid)

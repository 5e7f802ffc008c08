"""One GRPO step of ours, called directly: rollout, update, calibration, sync, and nothing around them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.workloads import Workload, named_recipe, random_prompts
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import batch_sharding, to_global, to_host
from fp8rl_jax.rollout.calibration import calibrate_on_prompts, observe_qkv, scales_from_amax
from fp8rl_jax.rollout.engine import LocalEngine, Prompts, Rollout
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.state import make_optimizer, sharded_state
from fp8rl_jax.training.step import Batch, StepConfig, update

OPTIMIZER = OptimizerConfig(learning_rate=1e-6)
RL = RLConfig()


class Laps:
    """A stopwatch that waits for what JAX still computes."""

    def __init__(self) -> None:
        self.seconds = {"seconds": 0.0}
        self._last = time.perf_counter()

    def end(self, part: str, *results: Any) -> None:
        """The time since the last call (or the start) was spent on `part`, which computed `results`."""
        jax.block_until_ready(results)
        now = time.perf_counter()
        self.seconds[part] = now - self._last
        self.seconds["seconds"] += now - self._last
        self._last = now


class Learner:
    """Masters and optimizer state. Recipes that take turns share one: what an update costs does not depend on its values."""

    def __init__(self, policy: Policy, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh):
        self.optimizer, self.mesh = optimizer, mesh
        self.state = sharded_state(policy, optimizer, mesh)


@dataclass
class GrpoStep:
    """Calling it runs one step and returns seconds: "gen", "train", "calibrate" where there is any, "sync", "seconds".

    Attributes:
        config: of the update; its recipe is the engine's, too.
        prompts: of every step.
        samples: completions of each prompt.
        sampling: without stop tokens, so that each step does the same work.
        scales: of an FP8 cache, calibrated at each step.
    """

    engine: LocalEngine
    learner: Learner
    config: StepConfig
    prompts: Prompts
    samples: int
    sampling: Sampling
    scales: KVScales | None = field(init=False)

    def __post_init__(self) -> None:
        recipe, policy = self.config.recipe, self.learner.state.policy
        self.prompts = to_global(self.prompts, batch_sharding(self.learner.mesh))
        rows = len(self.prompts.lengths) * self.samples
        self.advantages = jnp.asarray(np.where(np.arange(rows) % 2, 1.0, -1.0), jnp.float32)
        self.scales = calibrate_on_prompts(policy, self.prompts, recipe, self.engine.dtype)
        self.engine.sync(policy, self.scales)

    def __call__(self, number: int) -> dict[str, float]:
        laps = Laps()
        for part, results in self.parts(number):
            laps.end(part, results)
        return laps.seconds

    def parts(self, number: int) -> Iterator[tuple[str, Any]]:
        """One step: each part's name and what it computed, as soon as it is under way."""
        learner = self.learner
        rollout = self.engine.generate(self.prompts, self.samples, self.sampling, jax.random.key(number))
        yield "gen", rollout.tokens
        batch = Batch(*self.prompts[:2], rollout.tokens, rollout.mask, rollout.policy_logprobs, self.advantages)
        learner.state, logprobs, _ = update(learner.state, batch, self.config, learner.optimizer)
        yield "train", (learner.state, logprobs)
        if self.scales is not None:
            self.scales = self._calibrate(rollout)
            yield "calibrate", self.scales
        self.engine.sync(learner.state.policy, self.scales)
        yield "sync", self.engine.policy
        check_full(rollout)

    def _calibrate(self, rollout: Rollout) -> KVScales:
        seen = observe_qkv(
            self.learner.state.policy, *self.prompts[:2], rollout.tokens, rollout.mask, self.scales,
            recipe=self.config.recipe, dtype=self.engine.dtype, micro_batches=self.config.micro_batches,
        )  # fmt: skip
        return scales_from_amax(seen.amax, self.config.recipe)


def make_engine(workload: Workload, recipe: str) -> LocalEngine:
    """An engine with the library's own choice of the layer loop for this backend."""
    return LocalEngine(named_recipe(recipe), jnp.dtype(workload.compute_dtype), unroll=jax.default_backend() == "cpu")


def make_step(workload: Workload, learner: Learner, recipe: str) -> GrpoStep:
    """The step of a workload: one update, token-mean loss, no KL, AdamW behind clipping at norm 1."""
    shape = workload.step
    config = StepConfig(
        recipe=named_recipe(recipe),
        rl=replace(RL, correction=RL.correction.resolve(named_recipe(recipe).correction)),
        compute_dtype=workload.compute_dtype,
        temperature=1.0,
        micro_batches=shape.prompts // (workload.micro_batch_prompts or shape.prompts),
        remat=workload.remat,
    )
    prompts = random_prompts(shape, learner.state.policy.config.vocab_size)
    return GrpoStep(make_engine(workload, recipe), learner, config, prompts, shape.samples, Sampling(shape.new_tokens))


def make_learner(workload: Workload, mesh: jax.sharding.Mesh) -> Learner:
    """A learner of the workload's own weights."""
    return Learner(workload.load_policy(), make_optimizer(OPTIMIZER, updates=1), mesh)


def check_full(rollout: Rollout) -> None:
    """Every row has all its tokens: else two rounds did different work.

    Raises:
        RuntimeError: a row ended early.
    """
    if not np.all(to_host(rollout.mask)):
        raise RuntimeError("a completion ended early, though nothing ends one but its length")

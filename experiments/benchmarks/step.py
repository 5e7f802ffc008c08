"""One GRPO step of ours: a session's rollout and update, and nothing around them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.workloads import Workload, named_recipe, random_prompts
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.training import OptimizerConfig, TrainerConfig
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import LocalEngine, Prompts, Rollout
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.experience import RolloutExperience
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.state import TrainState

OPTIMIZER = OptimizerConfig(learning_rate=1e-6)


class Laps:
    """A stopwatch that waits for what JAX still computes."""

    def __init__(self) -> None:
        self.seconds = {"seconds": 0.0}
        self._last = time.perf_counter()

    def end(self, part: str, *results: Any) -> None:
        """The time since the last call (or the start) was spent on `part`, which computed
        `results`."""
        jax.block_until_ready(results)
        now = time.perf_counter()
        self.seconds[part] = now - self._last
        self.seconds["seconds"] += now - self._last
        self._last = now


class Shared:
    """The state of the sessions that take turns: what an update costs does not depend on its
    values."""

    def __init__(self) -> None:
        self.state: TrainState | None = None


@dataclass
class GrpoStep:
    """Calling it runs one step and returns seconds: "gen", "train", "calibrate" where there is any,
    "sync", and "seconds" of all, advantages and metrics among it.

    Attributes:
        session: its sampling is without stop tokens, so that each step does the same work.
        prompts: of every step.
        shared: state that other steps use, too; None: the session keeps its own.
    """

    session: Session
    prompts: Prompts
    shared: Shared | None = None

    def __post_init__(self) -> None:
        if self.shared is not None:
            if self.shared.state is not None:
                self.session.load(self.shared.state)
            self.shared.state = self.session.release()

    def __call__(self, number: int) -> dict[str, float]:
        if self.shared is not None:
            self.session.load(self.shared.state)
        self.session.sync(self.prompts)
        self.session.lap()
        start = time.perf_counter()
        rollout = self.sample(number)
        self.learn(rollout)
        seconds = {"seconds": time.perf_counter() - start}
        parts = self.session.clock.seconds
        if self.shared is not None:
            self.shared.state = self.session.release()
        check_full(rollout.rollout)
        return seconds | {name.removeprefix("time/"): value for name, value in parts.items()}

    def sample(self, number: int) -> RolloutExperience:
        """The first half of a step."""
        return self.session.rollout(self.prompts, key=jax.random.key(number))

    def learn(self, rollout: RolloutExperience) -> dict[str, float]:
        """The second."""
        return self.session.update(rollout, np.where(np.arange(len(rollout.texts)) % 2, 1.0, -1.0))


def make_engine(workload: Workload, recipe: str) -> LocalEngine:
    """An engine with the library's own choice of the layer loop for this backend."""
    return LocalEngine(
        named_recipe(recipe),
        jnp.dtype(workload.compute_dtype),
        unroll=jax.default_backend() == "cpu",
    )


def make_step(workload: Workload, recipe: str, shared: Shared | None = None) -> GrpoStep:
    """The step of a workload: one update, token-mean loss, no KL, AdamW behind clipping at norm
    1."""
    shape, policy = (
        workload.step,
        shared.state.policy if shared and shared.state else workload.load_policy(),
    )
    config = RunConfig(
        recipe=recipe.removesuffix("-exact"),
        precision=PrecisionConfig(exact=recipe.endswith("-exact")),
        compute_dtype=workload.compute_dtype,
        rollout=RolloutConfig(shape.prompts, shape.samples, shape.prompt_tokens, shape.new_tokens),
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(
            steps=1,
            micro_batch_prompts=workload.micro_batch_prompts,
            remat="layer" if workload.remat else "none",
        ),
    )
    session = Session(policy, ByteTokenizer(), config=config)
    session.sampling = replace(session.sampling, stop_token_ids=())
    return GrpoStep(session, random_prompts(shape, policy.config.vocab_size), shared)


def check_full(rollout: Rollout) -> None:
    """Every row has all its tokens: else two rounds did different work.

    Raises:
        RuntimeError: a row ended early.
    """
    if not np.all(to_host(rollout.mask)):
        raise RuntimeError("a completion ended early, though nothing ends one but its length")

"""What a session does, timed: its rollout alone, and a GRPO step by its parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.benchmarks.record import contest, result
from experiments.benchmarks.rounds import Plan, Side
from experiments.benchmarks.workloads import Shape, Workload, random_prompts
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.training import OptimizerConfig, TrainerConfig
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Prompts
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.experience import Experience
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.state import TrainState
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.resolve import resolve_model

OPTIMIZER = OptimizerConfig(learning_rate=1e-6)
GENERATION_SETTINGS = {
    "rollout": "Session.rollout, temperature 1, whole vocabulary, no stop token; seconds of "
    "its engine's generate",
    "logprobs": "two of each token",
}
STEP_SETTINGS = {
    "rollout": "Session.rollout; the samples of a prompt share its prefill; two "
    "log-probabilities of each token; texts",
    "update": "Session.update: one, no KL, no old log-probabilities, AdamW behind clipping at "
    "norm 1, float32 masters; metrics",
    "loss": "token mean",
    "sync": "cast, quantization and decode layout of all weights",
    "logging": "none",
}


def generation(
    workload: Workload, plan: Plan, peers: Sequence[PeerSpec] = (), threads: int = 1
) -> dict[str, Any]:
    """Time the rollout of `workload.generation`, recipe by recipe.

    Args:
        peers: started with the same prompts and the same weights; only for a workload of a named
            model.
        threads: processors of each peer.
    """
    shape, policy = workload.generation, workload.load_policy()
    prompts = random_prompts(shape, policy.config.vocab_size)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                Peer(spec, sampling_peer(workload, shape, prompts, threads), threads, shape.tokens)
            )
            for spec in peers
        ]
        ours = {
            recipe: _sampler(make_session(workload, shape, recipe, policy), prompts)
            for recipe in workload.generation_recipes
        }
        timed = contest(ours, GENERATION_SETTINGS, started, plan)
        return result("generation", workload, shape, timed)


def grpo_step(
    workload: Workload, plan: Plan, peers: Sequence[PeerSpec] = (), threads: int = 1
) -> dict[str, Any]:
    """Time steps of `workload.step`, recipe by recipe.

    Args:
        peers: started with the same prompts and the same weights; only for a workload of a named
            model.
        threads: processors of each peer.
    """
    tokens, shared = workload.step.tokens, Shared()
    with ExitStack() as stack:
        started = [
            stack.enter_context(Peer(spec, _step_peer(workload), threads, tokens)) for spec in peers
        ]
        ours = {recipe: make_step(workload, recipe, shared) for recipe in workload.step_recipes}
        timed = contest(ours, STEP_SETTINGS, started, plan)
        return result("grpo_step", workload, workload.step, timed)


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
        check_full(rollout)
        return seconds | {name.removeprefix("time/"): value for name, value in parts.items()}

    def sample(self, number: int) -> Experience:
        """The first half of a step."""
        return self.session.rollout(self.prompts, key=jax.random.key(number))

    def learn(self, rollout: Experience) -> dict[str, float]:
        """The second."""
        return self.session.update(rollout, np.where(np.arange(len(rollout.texts)) % 2, 1.0, -1.0))


ENDINGS = {
    "-reference": {"backend": "reference"},
    "-exact": {"exact": True},
    "-plain": {"exact": False},
}


def make_session(workload: Workload, shape: Shape, recipe: str, policy: Policy) -> Session:
    """A session for one update a rollout: token-mean loss, no KL, AdamW behind clipping at norm 1.

    Args:
        recipe: its name, with the engine and "/" before it where it is not the default one, with
            "-exact" or "-plain" behind it where it is not left to the machine whether the session
            is exact, and with "-reference" behind that for plain XLA in the place of kernels.
    """
    name, precision = recipe.rpartition("/")[2], PrecisionConfig()
    for ending, value in ENDINGS.items():
        if name.endswith(ending):
            name, precision = name.removesuffix(ending), replace(precision, **value)
    config = RunConfig(
        recipe=name,
        precision=precision,
        compute_dtype=workload.compute_dtype,
        rollout=RolloutConfig(
            shape.prompts,
            shape.samples,
            shape.prompt_tokens,
            shape.new_tokens,
            engine=engine_of(recipe),
        ),
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(
            steps=1,
            micro_batch_prompts=workload.micro_batch_prompts,
            remat="layer" if workload.remat else "none",
        ),
    )
    session = Session(policy, ByteTokenizer(), config=config)
    session.sampling = replace(session.sampling, stop_token_ids=())
    return session


def engine_of(recipe: str) -> str:
    """The engine that a side's name asks for, "static" in "static/bf16"; else the default."""
    return recipe.rpartition("/")[0] or RolloutConfig().engine


def make_step(workload: Workload, recipe: str, shared: Shared | None = None) -> GrpoStep:
    """The step of a workload."""
    policy = shared.state.policy if shared and shared.state else workload.load_policy()
    session = make_session(workload, workload.step, recipe, policy)
    return GrpoStep(session, random_prompts(workload.step, policy.config.vocab_size), shared)


def check_full(rollout: Experience) -> None:
    """Every row has all its tokens: else two rounds did different work.

    Raises:
        RuntimeError: a row ended early.
    """
    if not np.all(to_host(rollout.rollout.mask)):
        raise RuntimeError("a completion ended early, though nothing ends one but its length")


def _sampler(session: Session, prompts: Prompts) -> Side:
    session.sync(prompts)

    def run(number: int) -> dict[str, float]:
        session.lap()
        rollout = session.rollout(prompts, key=jax.random.key(number))
        check_full(rollout)
        return {"seconds": session.clock.seconds["time/gen"]}

    return run


def sampling_peer(
    workload: Workload, shape: Shape, prompts: Prompts, threads: int
) -> dict[str, Any]:
    """What a peer needs to sample the same; one completion of each prompt."""
    return {
        "model": str(resolve_model(workload.model)),
        "prompts": prompts.tokens.tolist(),
        "lengths": shape.lengths.tolist(),
        "threads": threads,
    }


def _step_peer(workload: Workload) -> dict[str, Any]:
    """What a peer needs to do the same step."""
    directory, shape = resolve_model(workload.model), workload.step
    config = read_policy_config(directory)
    return {
        **asdict(shape),
        "prompts": random_prompts(shape, config.vocab_size).tokens.tolist(),
        "model": str(directory),
        "config": asdict(config),
        "learning_rate": OPTIMIZER.learning_rate,
    }

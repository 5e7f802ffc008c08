"""Rollout where completions differ in length, as those of a policy in training do.

Lengths are log-normal, and every side ends each completion at the same given length. Nobody knows
it before the end: prompts have new ids at every call, since `paged` remembers how long the
completions of an id were. A side that cuts the prompts into batches takes them in the order in
which they come, and none sorts them by length. So what is timed is how well a side fills the places
of rows that have ended. Keys and values of every side have `CACHE_BYTES`.

    static    batches of equal rows, one after the other, each until its longest row has ended; the
              number of rows is the fastest of `BATCHES` that fit
    paged     one call with all prompts
    vLLM      one call with all prompts
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.grpo import engine_of, make_session, sampling_peer
from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.benchmarks.record import OURS, contest, result
from experiments.benchmarks.rounds import Plan, settle
from experiments.benchmarks.workloads import Uneven, Workload, random_prompts
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Prompts
from fp8rl_jax.training.session import Session

BATCHES = (16, 32, 64, 128, 256)
CACHE_BYTES = 2**30  # the least that the vLLM peer can be given
SETTINGS = {
    "rollout": "seconds of engine.generate with limits, temperature 1, whole vocabulary, no stop "
    "token; prompts in the order in which they come",
    "logprobs": "two of each token",
}


def uneven_generation(
    workload: Workload, plan: Plan, peers: Sequence[PeerSpec] = (), threads: int = 1
) -> dict[str, Any]:
    """Time the rollout of `workload.uneven`, engine by engine.

    Args:
        peers: started with the same prompts, lengths and weights; only for a workload of a named
            model.
        threads: processors of each peer.

    Returns:
        The entry. Every side makes the same tokens, so a ratio of seconds is one of tokens per
        second. raw["engines"] has, of each of ours, the rows of a batch, the seconds of each number
        of rows that was tried, and the engine's metrics, round by round.
    """
    shape, policy = workload.uneven, workload.load_policy()
    prompts = random_prompts(shape, policy.config.vocab_size)
    ours = {
        recipe: UnevenRollout(make_session(workload, shape, recipe, policy), prompts, shape)
        for recipe in workload.uneven_recipes
    }
    for recipe, side in ours.items():
        if engine_of(recipe) == "static":
            side.choose_rows(_fitting(policy.config, shape, workload.compute_dtype))
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                Peer(spec, sampling_peer(workload, shape, prompts, threads), threads, shape.tokens)
            )
            for spec in peers
        ]
        timed = contest(ours, SETTINGS, started, plan)
    entry = result("uneven_generation", workload, shape, timed)
    entry["raw"]["engines"] = {f"{OURS}{recipe}": side.about() for recipe, side in ours.items()}
    return entry


class UnevenRollout:
    """Calling it samples every completion to its own length, and returns the seconds.

    Attributes:
        rows: of one call of the engine; at first all.
        tried: seconds of a round, by the rows of a call.
        metrics: of the engine's last call in each round.
    """

    def __init__(self, session: Session, prompts: Prompts, shape: Uneven):
        session.sync(prompts)
        self.session, self.prompts, self.shape = session, prompts, shape
        self.rows = shape.rows
        self.calls = 0
        self.tried: dict[int, float] = {}
        self.metrics: list[dict[str, float]] = []

    def __call__(self, number: int) -> dict[str, float]:
        seconds, counted = self._timed(number, self.shape.lengths)
        self.metrics.append({name: float(value) for name, value in counted.items()})
        return {"seconds": seconds}

    def choose_rows(self, choices: Sequence[int]) -> None:
        """Time one round with each number of rows, behind its compilation, and keep the fastest."""
        for self.rows in choices:
            self._timed(0, np.ones_like(self.shape.lengths))
            settle()
            self.tried[self.rows], _ = self._timed(0, self.shape.lengths)
        self.rows = min(self.tried, key=self.tried.__getitem__)

    def about(self) -> dict[str, Any]:
        """For the record."""
        return {"rows": self.rows, "tried": self.tried, "metrics": self.metrics}

    def _timed(self, number: int, lengths: np.ndarray) -> tuple[float, dict[str, Any]]:
        """Seconds, and what the engine counted in its last call."""
        engine, samples, key = self.session.engine, self.shape.samples, jax.random.key(number)
        made, limits = [], jnp.asarray(lengths)
        self.calls += 1
        prompts = self.prompts._replace(ids=self.prompts.ids + self.calls * self.shape.prompts)
        start = time.perf_counter()
        with jax.set_mesh(self.session.mesh):
            for first in range(0, self.shape.rows, self.rows):
                rows = slice(first, first + self.rows)
                of_prompts = slice(first // samples, (first + self.rows) // samples)
                rollout = engine.generate(
                    Prompts(*(x[of_prompts] for x in prompts)),
                    samples,
                    self.session.sampling,
                    key,
                    limits=limits[rows],
                )
                made.append(to_host(rollout.mask).sum(1))
        seconds = time.perf_counter() - start
        if not np.array_equal(np.concatenate(made), lengths):
            raise RuntimeError("a completion has another length than its own")
        return seconds, to_host(rollout.metrics)


def _fitting(config: PolicyConfig, shape: Uneven, dtype: str) -> list[int]:
    """The rows whose keys and values fit in CACHE_BYTES, each with place for the longest."""
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    slots = shape.prompt_tokens + shape.new_tokens
    row = values * slots * jnp.dtype(dtype).itemsize
    return [
        rows
        for rows in BATCHES
        if rows * row <= CACHE_BYTES and shape.rows % rows == 0 and rows % shape.samples == 0
    ]
